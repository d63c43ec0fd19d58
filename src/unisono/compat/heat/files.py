"""HeAT's readers of files: MNIST by torchvision, HDF5 files window by window, TFRecord indices."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch import Tensor

from unisono import data_parallel
from unisono.comm import Communicator
from unisono.comm.mpi_style import MPI_WORLD
from unisono.compat.heat.arrays import array
from unisono.compat.modules import loaded
from unisono.data_parallel import shard
from unisono.data_parallel.dataset import generator_of
from unisono.errors import PartitionError, explain
from unisono.launch.job_files import appearing_whole
from unisono.topology import decompose

__all__ = ["DataLoader", "MNISTDataset", "PartialH5Dataset", "dali_tfrecord2idx"]


class MNISTDataset(data_parallel.Dataset):
    """`torchvision.datasets.MNIST`, its rows split over ranks. Collective over `MPI_WORLD`.

    Args:
        root: directory of the files; rank 0 looks first, and downloads.
        train: the training images, or those to test with.
        transform: of each image; `target_transform` of each label.
        download: whether files that are missing are fetched.
        split: 0; rows are split.
        ishuffle: let the loader exchange rows in the background of an epoch.
        test_set: every rank keeps all rows, and nothing is shuffled.
    """

    def __init__(
        self,
        root: str,
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        download: bool = True,
        split: int = 0,
        ishuffle: bool = False,
        test_set: bool = False,
    ) -> None:
        if split != 0:
            raise PartitionError.because(
                f"MNISTDataset(split={split!r})", "rows are split", hint="split=0"
            )
        kind = loaded("torchvision.datasets", "MNISTDataset").MNIST
        ranks = Communicator.of(MPI_WORLD)
        arguments = (root, train, transform, target_transform, download)
        first = kind(*arguments) if ranks.rank == 0 else None
        ranks.barrier()
        self.images: Any = kind(*arguments) if first is None else first
        """torchvision's data set; it turns a row into an image."""
        images, labels = (torch.as_tensor(t) for t in (self.images.data, self.images.targets))
        rows = (images, labels) if test_set else (shard(images), shard(labels))
        super().__init__(rows[0], None, ishuffle, test_set, comm=MPI_WORLD)
        self.targets = rows[1][self._cut_slice]
        self.htdata, self.httargets = (
            array(t, is_split=None if test_set else 0, comm=MPI_WORLD) for t in rows
        )

    def __getitem__(self, index: Any) -> Any:
        """Return image and label, transformed as torchvision does it."""
        self.images.data, self.images.targets = self.data, self.targets
        return self.images[index]

    def __getstate__(self) -> dict[str, Any]:
        """A worker process needs the own rows only."""
        return {**super().__getstate__(), "httargets": None}


class PartialH5Dataset(torch.utils.data.Dataset[Any]):
    """Rows of an HDF5 file, of which a rank holds a window at a time.

    A subclass says in `__getitem__(index)` what an item is, of the tensors that the window holds:
    one attribute for each name in `dataset_names`. `DataLoader` moves the window when its rows are
    used; a thread reads the next ones meanwhile. Ranks have equally many rows.

    Args:
        file: path of the file.
        comm: the ranks that share the rows.
        dataset_names: data sets of the file; all have the same number of rows.
        transforms: one for each part of an item, or None.
        use_gpu: move batches to this rank's GPU, if there is one.
        validate_set: all rows on every rank, at once.
        initial_load: rows of the first window.
        load_length: rows of the later windows, at most `initial_load`.
    """

    def __init__(
        self,
        file: str,
        comm: Any = MPI_WORLD,
        dataset_names: str | Sequence[str] = "data",
        transforms: Sequence[Callable[[Any], Any] | None] | None = None,
        use_gpu: bool = True,
        validate_set: bool = False,
        initial_load: int = 7000,
        load_length: int = 1000,
    ) -> None:
        self.file, self.comm, self.transforms = file, comm, transforms
        self.dataset_names = [dataset_names] if isinstance(dataset_names, str) else [*dataset_names]
        self.use_gpu = use_gpu and torch.cuda.is_available()
        self.validate_set, self.load_length = validate_set, load_length
        ranks = Communicator.of(comm)
        with loaded("h5py", "PartialH5Dataset").File(file) as opened:
            lengths = [len(opened[name]) for name in self.dataset_names]
        if len(set(lengths)) != 1 or lengths[0] < ranks.size or min(initial_load, load_length) < 1:
            raise PartitionError.because(
                f"PartialH5Dataset({self.dataset_names}) over {ranks.size} ranks",
                f"rows {lengths}; initial_load={initial_load}, load_length={load_length}",
                "as many rows in each data set, at least one per rank, loads of at least one",
            )
        self.total_size = lengths[0]
        each = self.total_size // ranks.size
        first = decompose.block(self.total_size, ranks.size, ranks.rank)[0]
        self.local_data_start, self.local_data_end = first, first + each
        if validate_set:
            self.local_data_start, self.local_data_end = 0, self.total_size
            initial_load = self.total_size
        self.initial_load = min(initial_load, len(self))
        self.epoch = 0
        self.hold(self.read(0, self.initial_load))

    def __len__(self) -> int:
        """Rows of this rank, in the window or not."""
        return self.local_data_end - self.local_data_start

    def __getitem__(self, index: Any) -> Any:
        """Return one item; to be written by a subclass."""
        raise NotImplementedError(
            explain(
                f"{type(self).__name__}[{index!r}]",
                "a subclass says what an item is",
                hint=f"def __getitem__(self, index): return self.{self.dataset_names[0]}[index]",
            )
        )

    def Shuffle(self) -> None:
        """Do nothing: rows are read from the file again."""

    Ishuffle = Shuffle

    def read(self, start: int, stop: int) -> list[Tensor]:
        """Return rows `[start, stop)` of this rank from the file, for each name."""
        here = slice(self.local_data_start + start, self.local_data_start + stop)
        with loaded("h5py", "PartialH5Dataset").File(self.file) as opened:
            return [torch.as_tensor(opened[name][here]) for name in self.dataset_names]

    def hold(self, window: Sequence[Tensor]) -> None:
        """Show these rows."""
        for name, rows in zip(self.dataset_names, window, strict=True):
            setattr(self, name, rows)


class _Windows(torch.utils.data.Sampler[int]):
    """Random places in the window of a file, which moves on when all its rows are used."""

    def __init__(self, dataset: PartialH5Dataset, batch_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        data, batch = self.dataset, self.batch_size
        generator = generator_of("windows", data.epoch, data.local_data_start)
        data.epoch += 1
        # Whole batches: the window moves when the loader has fetched the last of them.
        first, later = (
            max(rows // batch, 1) * batch
            for rows in (data.initial_load, min(data.initial_load, data.load_length))
        )
        start, stop = 0, min(first, len(data))
        window = data.read(start, stop)
        with ThreadPoolExecutor(1) as reader:
            while start < stop:
                data.hold(window)
                after = min(stop + later, len(data))
                coming: Future[list[Tensor]] = reader.submit(data.read, stop, after)
                yield from torch.randperm(stop - start, generator=generator).tolist()
                start, stop, window = stop, after, coming.result()


class DataLoader(data_parallel.DataLoader):
    """`unisono.data_parallel.DataLoader`, which moves the window of a `PartialH5Dataset`, too."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if isinstance(dataset, PartialH5Dataset):
            if num_workers:
                raise ValueError("num_workers has to be 0: a thread reads the rows of the window")
            collate_fn = _Collate(dataset, collate_fn or torch.utils.data.default_collate)
            if not dataset.validate_set:
                kwargs["sampler"] = _Windows(dataset, batch_size)
        super().__init__(dataset, batch_size, num_workers, collate_fn, *args, **kwargs)


class _Collate:
    """Transforms the parts of each item, makes a batch of them, and moves it to the GPU."""

    def __init__(self, dataset: PartialH5Dataset, together: Callable[[list[Any]], Any]) -> None:
        self.transforms, self.use_gpu = dataset.transforms, dataset.use_gpu
        self.together = together

    def __call__(self, items: list[Any]) -> Any:
        batch = self.together([self._transformed(item) for item in items])
        return _on_gpu(batch) if self.use_gpu else batch

    def _transformed(self, item: Any) -> Any:
        if self.transforms is None:
            return item
        parts = item if isinstance(item, tuple | list) else (item,)
        steps = zip(parts, self.transforms, strict=True)
        done = tuple(part if step is None else step(part) for part, step in steps)
        return done if isinstance(item, tuple | list) else done[0]


def _on_gpu(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.cuda()
    return type(batch)(map(_on_gpu, batch)) if isinstance(batch, tuple | list) else batch


def dali_tfrecord2idx(train_dir: str, train_idx_dir: str, val_dir: str, val_idx_dir: str) -> None:
    """Write an index beside every TFRecord file: offset and length of each record, one per line.

    All ranks may do so at once: a reader finds a whole index, written by any of them.

    Args:
        train_dir: directory of the files to train on; their indices go to `train_idx_dir`.
        train_idx_dir: made if it is missing.
        val_dir: the same for those to validate with; likewise `val_idx_dir`.
        val_idx_dir: made if it is missing.
    """
    for source, target in ((train_dir, train_idx_dir), (val_dir, val_idx_dir)):
        Path(target).mkdir(parents=True, exist_ok=True)
        for file in sorted(path for path in Path(source).iterdir() if path.is_file()):
            index = Path(target) / f"{file.name}.idx"
            with appearing_whole(index) as draft:
                draft.write_text("".join(_records(file)))


def _records(file: Path) -> Iterator[str]:
    """Yield a line for each record: 8 bytes of length, 4 of checksum, the data, 4 of checksum."""
    size, at = file.stat().st_size, 0
    with file.open("rb") as opened:
        while at < size:
            opened.seek(at)
            (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))
            if at + 16 + length > size:
                raise PartitionError.because(
                    f"records of {file}", f"{size} bytes", f"{at} + 16 + {length} > {size}"
                )
            yield f"{at} {16 + length}\n"
            at += 16 + length
