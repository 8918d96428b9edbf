"""A site of the tests. FEDBE_TEST_FAULTS names sites that are broken: "site-2=nan site-3=raise site-4=die"."""

import os

import federation_for_tests as task
import nvflare.client as flare
import torch

from fedbe.nvflare import fit


def main():
    torch.set_num_threads(1)
    flare.init()
    site = flare.get_site_name()
    fault = dict(pair.split("=") for pair in os.environ.get("FEDBE_TEST_FAULTS", "").split()).get(site)
    client = int(site.removeprefix("site-")) - 1
    federation = task.federation()
    index = federation.clients[client]
    while flare.is_running():
        received = flare.receive()
        if fault == "raise":
            raise RuntimeError("this site is broken")
        if fault == "die":
            os._exit(9)
        settings = task.simulation("fedavg").local_settings(received.current_round + 1, client)
        inputs, labels = federation.train.select(index), federation.labels[index]
        reply = fit(received, task.model(), inputs, labels, settings, client_id=client)
        if fault == "nan":
            next(iter(reply.params.values())).view(-1)[0] = float("nan")
        flare.send(reply)


if __name__ == "__main__":
    main()
