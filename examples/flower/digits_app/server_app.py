"""The server. To use another method, change the strategy."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fedbe.flower
from digits_app.task import Net, load_partition, to_pixels

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train all rounds; a stopped run is resumed from its folder."""
    torch.set_num_threads(1)  # the model is small, and the number of threads changes the last bits
    config = context.run_config
    clients, seed = int(config["clients"]), int(config["seed"])
    train_data, test_data, partition = load_partition(clients, seed)
    strategy = fedbe.flower.strategy(
        str(config["method"]),
        model=Net,
        unlabeled=to_pixels(train_data, partition.server),
        seed=seed,
        fraction_train=float(config["fraction"]),
        fraction_evaluate=0.0,
        min_train_nodes=1,  # Flower's default of 2 would wait for a second node even if there is one client only
        min_available_nodes=clients,
        total_clients=clients,
        identify=True,
        folder=config["folder"] or None,
    )

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        net = Net()
        net.load_state_dict(fedbe.flower.from_record(arrays, net))
        with torch.no_grad():
            correct = net(to_pixels(test_data)).argmax(1) == test_data.labels
        return MetricRecord({"accuracy": float(correct.float().mean())})

    arrays, rounds = fedbe.flower.to_record(Net().state_dict()), int(config["rounds"])
    if config["folder"]:
        fedbe.flower.resume(strategy, grid, arrays, rounds, evaluate_fn=evaluate)
    else:
        strategy.start(grid, arrays, rounds, evaluate_fn=evaluate)
