"""What each site runs: train on its own digits by the rules of the server's method."""

import nvflare.client as flare
import torch
from task import CLIENTS, Net, load_partition, to_pixels

from fedbe import LocalSettings
from fedbe.nvflare import fit


def main() -> None:
    """Train in every round in which the server asks."""
    torch.set_num_threads(1)
    flare.init()
    train, _, parts = load_partition()
    number = int(flare.get_site_name().removeprefix("site-")) - 1  # the simulator's sites are site-1, site-2 …
    index = parts.clients[number % CLIENTS]
    settings = LocalSettings(epochs=5, lr=0.05)
    while flare.is_running():
        flare.send(fit(flare.receive(), Net(), to_pixels(train, index), train.labels[index], settings))


if __name__ == "__main__":
    main()
