"""Only adapters travel: LoRA (`peft`) on the transformer of text.py. The backbone is frozen and stays where it is.

    pip install -c constraints.txt -e '.[examples]'
    python examples/lora.py

LoRA averages its two factors separately, and the mean of products is not the product of means. So start with few local
epochs, and look at the accuracy of the average.

The first lines compare traffic and memory with full fine-tuning. A client needs the frozen weights, too, but no
gradient and no momentum for them. Activations come on top; LoRA does not make them smaller.
"""

import torch
from library_loop import federate
from text import build_model, load_mails
from torch import nn

import fedbe
from fedbe.data import split


def build_adapters() -> nn.Module:
    """The transformer with adapters of rank 4 in its attention, and a trainable classifier."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules=["query", "value"])
    return get_peft_model(build_model(), config)


def print_sizes(adapted: nn.Module, whole: nn.Module, clients: int) -> None:
    """Traffic and memory next to full fine-tuning, in float32: 4 bytes a number."""
    numbers = {
        "full fine-tuning": (fedbe.Layout(whole).size, sum(p.numel() for p in whole.parameters())),
        "LoRA": (fedbe.Layout(adapted).size, sum(p.numel() for p in adapted.parameters())),
    }
    print(f"{'kB':18}{'a message':>12}{'a client':>12}{'the server':>12}")
    for name, (trained, held) in numbers.items():
        client = held + 2 * trained  # the weights; a gradient and a momentum for each weight that is trained
        server = held + clients * trained  # the model, and what the clients sent
        print(f"{name:18}" + "".join(f"{4 * count / 1e3:>12,.0f}" for count in (trained, client, server)))


def main(rounds: int = 2) -> float:
    torch.manual_seed(0)
    model = build_adapters()
    print_sizes(model, build_model(), clients=4)
    task = load_mails()
    partition = split("iid", task.train.labels, clients=4, server=200, seed=0)
    settings = fedbe.LocalSettings(epochs=3, batch_size=20, lr=0.02, weight_decay=0.0)
    return federate(model, task, partition, settings, rounds, distill_epochs=5)


if __name__ == "__main__":
    main()
