"""What the server does. The strategy is the line to look at."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fedbe.flower
from digits_app.task import Net, parts, pixels
from fedbe.algorithms.methods import get_method

torch.set_num_threads(1)  # the model is small, and threads would change the last bits

DISTILLATION = {"distill_lr": 3e-3}  # 300 images make few steps, so longer ones

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train all rounds; a run that was stopped goes on where its folder says."""
    config = context.run_config
    clients, seed = int(config["clients"]), int(config["seed"])
    data, test, split = parts(clients, seed)
    strategy = fedbe.flower.strategy(
        str(config["method"]),
        model=Net,
        unlabeled=pixels(data, split.server),
        seed=seed,
        fraction_train=float(config["fraction"]),
        fraction_evaluate=0.0,
        min_train_nodes=1,  # Flower's 2 would wait for a second node even if one client is all there is
        min_available_nodes=clients,
        total_clients=clients,
        identify=True,
        folder=config["folder"] or None,
        **DISTILLATION if "distill_lr" in get_method(str(config["method"])).settings() else {},
    )

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        net = Net()
        net.load_state_dict(fedbe.flower.from_record(arrays, net))
        with torch.no_grad():
            right = net(pixels(test)).argmax(1) == test.labels
        return MetricRecord({"accuracy": float(right.float().mean())})

    weights, rounds = fedbe.flower.to_record(Net().state_dict()), int(config["rounds"])
    if config["folder"]:
        fedbe.flower.resume(strategy, grid, weights, rounds, evaluate_fn=evaluate)
    else:
        strategy.start(grid, weights, rounds, evaluate_fn=evaluate)
