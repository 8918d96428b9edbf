"""Make an environment for each peer: `python -m benchmarks.peers.install FOLDER [peer …]`.

Each peer has its own, with the same torch as ours. What is there already stays as it is.
"""

import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
PEERS = {
    "flwr": ["flwr[simulation]==1.41.0"],
    "pfl": ["pfl[pytorch]==0.6.0"],
    "fluke": ["fluke-fl==0.8.1", "torchvision==0.28.0"],
    "fedlab": ["fedlab==1.3.0", "torchvision==0.28.0", "setuptools<81"],
    # It asks for Python 3.12; its code also runs with 3.11, for which there is a torch of this version without CUDA.
    "blazefl": ["--ignore-requires-python", "blazefl==2.0.3", "numpy==2.4.6"],
}


def install(folder: Path, peer: str) -> None:
    """Create `folder/peer` and install the peer, unless that was done before."""
    done = folder / peer / "installed"
    if done.exists():
        return
    venv.create(folder / peer, with_pip=True, clear=True)
    pip = [str(folder / peer / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, TORCH, *PEERS[peer]], check=True)
    done.touch()


def main(folder: Path, peers: list[str]) -> int:
    """Install the named peers, or all. Returns the number of those that failed."""
    failed = 0
    for peer in peers or PEERS:
        try:
            install(folder, peer)
        except subprocess.CalledProcessError as error:
            failed += 1
            print(f"{peer}: {error}", file=sys.stderr)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
