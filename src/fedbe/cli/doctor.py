"""`fedbe doctor`: what fedbe finds on this machine."""

from importlib.metadata import PackageNotFoundError, version

from fedbe.cli.console import out, plain_table
from fedbe.errors import install_command

# Extra of fedbe -> the distributions that it needs, any one of which is enough.
EXTRAS = {
    "flower": ("flwr",),
    "nvflare": ("nvflare",),
    "ray": ("ray",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "parquet": ("pyarrow",),
    "examples": ("peft",),  # which needs transformers
}
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def doctor() -> None:
    """Show versions, processor, devices, precision, workers, data and extras."""
    table = plain_table("what", "found")
    for name, value in _findings():
        table.add_row(name, value)
    out.print(table)


def _findings() -> list[tuple[str, str]]:
    import platform

    from fedbe.core.compute import cores, cpu_flags, resolve_precision
    from fedbe.core.devices import ACCELERATORS, default_workers, describe_device, list_devices, resolve_device
    from fedbe.data.catalogue import DATASETS, data_root, local_path

    features = [feature for feature in CPU_FEATURES if feature in cpu_flags()]
    devices = [describe_device(name) for kind in ("cpu", *ACCELERATORS) for name in list_devices(kind)]
    chosen = resolve_device("auto")
    here = [name for name, info in DATASETS.items() if info.read is None or local_path(name)]
    return [
        ("fedbe", version("fedbe")),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, version(name)) for name in ("torch", "numpy")),
        ("processor", f"{platform.machine()} with {', '.join(features) or 'no known vector unit'}"),
        ("devices", f"{', '.join(devices)} (--device auto: {chosen})"),
        ("precision", f"{resolve_precision('auto', chosen)} (--precision auto)"),
        ("workers", f"{default_workers(chosen, cores())} (default of --workers)"),
        ("data", f"{', '.join(here)} (in {data_root()})"),
        *(
            (f"extra {extra}", _installed(names) or f"missing: {install_command(extra)}")
            for extra, names in EXTRAS.items()
        ),
    ]


def _installed(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return ""
