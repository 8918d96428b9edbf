"""Only adapters travel: LoRA (`peft`) on the transformer of text.py. The backbone is frozen and stays where it is.

    pip install 'fedbe[examples]'
    python examples/lora.py

LoRA averages its two factors separately, and the mean of products is not the product of means. So start with few local
epochs, and look at the accuracy of the average.
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


def main(rounds: int = 2) -> float:
    torch.manual_seed(0)
    model = build_adapters()
    whole = sum(parameter.numel() for parameter in model.parameters())
    sent = fedbe.Layout(model).size
    sizes = f"{4 * sent / 1e3:.0f} kB instead of {4 * whole / 1e3:.0f} kB"
    print(f"{sent:,} of {whole:,} parameters travel: {sizes} a message")
    task = load_mails()
    partition = split("iid", task.train.labels, clients=4, server=200, seed=0)
    settings = fedbe.LocalSettings(epochs=3, batch_size=20, lr=0.02, weight_decay=0.0)
    return federate(model, task, partition, settings, rounds, num_samples=4, distill_epochs=5)


if __name__ == "__main__":
    main()
