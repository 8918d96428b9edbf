"""The data sets that have a name in fedbe: sources, file hashes, licences, and where they are on this machine.

The hashes are SHA-256. The hashes of archives are published with them. The hashes of CIFAR's files were computed from
files that match the official MD5 sums.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedbe.data.dataset import Task
from fedbe.data.readers import cifar, idx, tiny_imagenet
from fedbe.errors import DataError

Reader = Callable[[str, Path], Task]


@dataclass(frozen=True)
class Remote:
    """A file to download: its official URL and its SHA-256."""

    url: str
    sha256: str

    @property
    def file(self) -> str:
        """The file name, the last part of the URL."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DatasetInfo:
    """One entry of the catalogue.

    Attributes:
        description: one line for people.
        licence: the licence that its authors state.
        read: (name, directory or archive) -> Task; None if the data set is embedded in fedbe.
        paths: directories and archives under the data directory that may have it, the preferred one first.
        remotes: the files to download.
        file_hashes: SHA-256 of each file in the directory paths[0]; empty if the archive itself is kept.
        plain_hashes: SHA-256 of the same files without gzip, which may be there instead.
        megabytes: size of the download.
    """

    description: str
    licence: str
    read: Reader | None = None
    paths: tuple[str, ...] = ()
    remotes: tuple[Remote, ...] = ()
    file_hashes: Mapping[str, str] = field(default_factory=dict)
    megabytes: int = 0
    plain_hashes: Mapping[str, str] = field(default_factory=dict)


TORONTO = "https://www.cs.toronto.edu/~kriz"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
STANFORD = "http://cs231n.stanford.edu"

CIFAR10_ARCHIVE = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR100_ARCHIVE = "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
TINY_IMAGENET_ARCHIVE = "6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821"
CIFAR10_PATHS = ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
CIFAR10_REMOTES = (Remote(f"{TORONTO}/cifar-10-binary.tar.gz", CIFAR10_ARCHIVE),)
CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
MNIST_FILES = {
    "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}
MNIST_PLAIN_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
FASHION_PLAIN_FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}

DATASETS: Mapping[str, DatasetInfo] = {
    "digits": DatasetInfo("1,797 digits, 8×8, 10 classes", "CC BY 4.0"),
    "swissroll": DatasetInfo("1,800 points, 3 classes", "generated"),
    "cifar10": DatasetInfo(
        "60,000 photos, 32×32, 10 classes",
        "none stated",
        cifar.read,
        CIFAR10_PATHS,
        CIFAR10_REMOTES,
        CIFAR10_FILES,
        170,
    ),
    "cifar10-16px": DatasetInfo(
        "CIFAR-10, averaged to 16×16",
        "none stated",
        cifar.read_16px,
        CIFAR10_PATHS,
        CIFAR10_REMOTES,
        CIFAR10_FILES,
        170,
    ),
    "cifar100": DatasetInfo(
        "60,000 photos, 32×32, 100 classes",
        "none stated",
        cifar.read,
        ("cifar-100-binary", "cifar-100-python", "cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"),
        (Remote(f"{TORONTO}/cifar-100-binary.tar.gz", CIFAR100_ARCHIVE),),
        {
            "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
            "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
        },
        169,
    ),
    "tiny-imagenet": DatasetInfo(
        "110,000 photos, 64×64, 200 classes",
        "research only",
        tiny_imagenet.read,
        ("tiny-imagenet-200", "tiny-imagenet-200.zip"),
        (Remote(f"{STANFORD}/tiny-imagenet-200.zip", TINY_IMAGENET_ARCHIVE),),
        megabytes=248,
    ),
    "mnist": DatasetInfo(
        "70,000 digits, 28×28, 10 classes",
        "CC BY-SA 3.0",
        idx.read,
        ("mnist", "MNIST/raw"),
        tuple(Remote(f"{MNIST}/{file}", sha256) for file, sha256 in MNIST_FILES.items()),
        MNIST_FILES,
        12,
        MNIST_PLAIN_FILES,
    ),
    "fashion-mnist": DatasetInfo(
        "70,000 clothes, 28×28, 10 classes",
        "MIT",
        idx.read,
        ("fashion-mnist", "FashionMNIST/raw"),
        tuple(Remote(f"{FASHION}/{file}", sha256) for file, sha256 in FASHION_FILES.items()),
        FASHION_FILES,
        31,
        FASHION_PLAIN_FILES,
    ),
}


def data_root(root: Path | None = None) -> Path:
    """The data directory: `root`, else the environment variable FEDBE_DATA, else the user's cache directory."""
    if root is not None:
        return Path(root)
    if os.environ.get("FEDBE_DATA"):
        return Path(os.environ["FEDBE_DATA"])
    from platformdirs import user_cache_path  # imported late: only needed without `root` and FEDBE_DATA

    return user_cache_path("fedbe") / "data"


def local_path(name: str, root: Path | None = None) -> Path | None:
    """The directory or archive of the data set `name` under the data directory, or None if it is not there."""
    paths = [data_root(root) / path for path in DATASETS[name].paths]
    return next((path for path in paths if path.exists()), None)


def check_official(name: str, path: Path) -> None:
    """Compare the files at `path` with the SHA-256 that the catalogue has for them; others are not checked.

    Raises:
        DataError: if a file has another hash: it is damaged, or not the official one.
    """
    info = DATASETS[name]
    known = [(path, remote.sha256) for remote in info.remotes if remote.file == path.name]
    if path.is_dir():
        known = [(path / file, sha256) for file, sha256 in {**info.file_hashes, **info.plain_hashes}.items()]
    for file, sha256 in known:
        if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            raise DataError(
                f"{file} is damaged or not the official {name}: move {path} away and run `fedbe data get {name}`, or "
                f"read it as it is with `{name}:{path}`"
            )


def require_local_path(name: str, root: Path | None = None) -> Path:
    """Like `local_path`, but raises a `DataError` that says how to download a missing data set."""
    path = local_path(name, root)
    if path is None:
        raise DataError(f"{name} is not in {data_root(root)}; get it with `fedbe data get {name}`")
    return path
