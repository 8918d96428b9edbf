"""The server: any method of fedbe; the test accuracy after every round."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fedbe.flower
from fedbe.core.compute import server_threads
from fedbe.experiment.federation import initial_weights
from fedbe_baseline.dataset import get_recipe, load_federation

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train all rounds; a stopped run is resumed from its folder."""
    config = context.run_config
    federation, seed, clients = load_federation(config), int(config["seed"]), int(config["clients"])
    model = initial_weights(federation.model, seed)
    torch.set_num_threads(server_threads(model))
    method = get_recipe(config).method_for(str(config["method"]))
    strategy = fedbe.flower.strategy(
        method.name,
        model,
        unlabeled=federation.server,
        labels=federation.server_labels,  # for the report only
        seed=seed,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=clients,
        total_clients=clients,
        identify=True,
        folder=config["folder"] or None,
        **method.settings(),
    )

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        state = fedbe.flower.from_record(arrays, model)
        probabilities = strategy.server.predict_proba(state, federation.test)
        return MetricRecord({"accuracy": float((probabilities.argmax(1) == federation.test_labels).float().mean())})

    start = fedbe.flower.to_record(model.state_dict())
    run = fedbe.flower.resume if config["folder"] else type(strategy).start
    run(strategy, grid, start, int(config["rounds"]), evaluate_fn=evaluate)
