"""
DumbDiLoCo: many machines train one model with nothing between them but a repository of files.

    hub = FolderTransport("./runs/hub")
    MasterOuterLoop(hub, settings, weights).run()                                      # one machine
    Trainer(model, config, data, coordinator=DumbDiLoCo(hub, "a", settings)).train()   # each node

The algorithm (DiLoCo, Douillard et al. 2023, made asynchronous):
  1. A worker trains an inner loop: `inner_steps` optimizer steps, more on a fast node and fewer on
     a slow one, so that all loops last as long. Then it uploads its pseudo-gradient, baseline -
     current weights, and trains on. Its baseline moves by what it has sent.
  2. The master adds up the deltas of each node, averages over the nodes and takes one Nesterov
     step. It publishes what the step changed, and deletes what it has merged, in ONE commit.
  3. A worker that sees a newer global model moves to it. It keeps all it has learned that this
     global model does not contain yet.
Sign, once for all: delta = before - after, so the global model moves by MINUS the averaged delta.

  global/step_count.json                            the state: outer step, hashes, nodes, settings
  global/latest.safetensors                         the keyframe: the whole model, fp32
  global/momentum.safetensors                       outer momentum of the keyframe
  global/update_<outer_step>.safetensors            what an outer step changed, coded
  global/history_<keyframe>.jsonl                   a line per outer round since that keyframe
  nodes/<node_id>/delta_<local_step>.safetensors    waiting to be merged
  config.json, model.safetensors, tokenizer*.json   the keyframe, as transformers wants it
  README.md and its picture                         the page: progress, nodes, how to join

On the Hub, deltas, updates and momentum may lie in a Storage Bucket beside the repository.

The global model of outer step t is the keyframe minus the updates since. Whoever folds the same
files gets the same bits. So a new master needs no more than these files.

Trust: whoever may write to the repository may move the model. A master checks shapes, run, replays,
numbers that are not finite and outsized norms. It does not authenticate nodes or hide data.
"""
import contextlib
import copy
import ctypes
import dataclasses
import difflib
import errno
import functools
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import stat
import statistics
import tempfile
import threading
import time
import typing
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypedDict
from urllib.parse import quote

import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

STEP, WEIGHTS = "global/step_count.json", "global/latest.safetensors"
MOMENTUM, UPDATE = "global/momentum.safetensors", "global/update_{}.safetensors"
HISTORY = "global/history_{}.jsonl"
PAGE, CURVE, MODEL = "README.md", "loss.svg", "model.safetensors"
NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
IN_BUCKET = re.compile(r"nodes/|global/update_|global/momentum")
DELTA = re.compile(r"nodes/([^/]+)/delta_(\d{1,18})\.safetensors")

DEFAULTS = dict(            # a setting that is not given; config.py explains each
    node_id="", hub="./runs/hub", bucket="auto", private=True, license="", inner_steps=50,
    outer_lr=0.7, outer_momentum=0.9, outer_warmup=20, round_timeout=0.0, poll_interval=0.0,
    codec="int4", commits_per_hour=100, wait=False, max_pending=4, join_warmup=20,
    max_norm_ratio=10.0, keyframe_every=10, squash_gb=20.0, max_outer_steps=0, status=False)

ACTIVE_ROUNDS = 4           # a node that contributed to none of this many rounds is not waited for
FORGET_AFTER = 7 * 86400    # s after which a node that sends nothing leaves the state
PAGE_EVERY = 600            # s between two versions of the page
FOLLOW_LATER = 0.75         # largest share of a prediction error that stays local at an install
LAST_ROUNDS = 3             # rounds before the end over which the outer momentum falls
SHORT_LOOP = 25             # steps of an inner loop that keep the nodes close from the first round
LOOP_RANGE = 4              # a node's loops have at most so many times more or fewer steps
DENIALS = 5                 # 403s in a row, where commits were taken before, until one counts
FAR_ABOVE, STRIKES = 0.25, 3    # relative excess of a node's loss; deltas in a row until it is out
NEAR = 0.05                 # relative excess with which it is in again


class Conflict(Exception):
    """The repository has moved since the version a commit was computed from."""


class Unavailable(Exception):
    """The repository, or this machine's disk, cannot be used now; a commit may or may not have been
    made. Arguments: what, and the seconds to wait that it asked for, if it did."""


class StorageFull(Unavailable):
    """The repository's storage quota is used up. The commit was not made. A squash frees space."""


class Refused(Exception):
    """Trying again will not help: no rights, no such repository, taken over by another."""


class NoRepository(Refused):
    """There is no repository of this name, or none that this token may see."""


class Replay(ValueError):
    """A delta that was merged before: its deletion failed, or somebody put it back."""


class Superseded(Refused):
    """Another master has published."""


def complete(settings: dict | None) -> dict:
    """Fill in the defaults. Raises ValueError for a bad setting."""
    settings = {**DEFAULTS, **(settings or {})}
    for key, value in settings.items():
        if key not in DEFAULTS:
            near = difflib.get_close_matches(key, DEFAULTS, n=1, cutoff=0.0)[0]
            raise ValueError(f"distributed.{key} is not a setting; the nearest is {near}")
        check_value(f"distributed.{key}", value, type(DEFAULTS[key]))
        least = 1 if key in ("inner_steps", "max_pending", "keyframe_every") else 0
        if not isinstance(value, str) and value < least:
            raise ValueError(f"distributed.{key}={value}: must be at least {least}")
    codec, momentum = settings["codec"], settings["outer_momentum"]
    if codec not in CODECS:
        raise ValueError(f"distributed.codec={codec}: wants one of {', '.join(CODECS)}")
    if settings["outer_lr"] == 0:
        raise ValueError("distributed.outer_lr=0: must be above 0")
    if momentum >= 1:
        raise ValueError(f"distributed.outer_momentum={momentum}: must be below 1")
    return settings


def write_line(line: str):
    """Print a line. A terminal that is gone, or cannot show a letter, must not end the work."""
    try:
        print(line, flush=True)
    except UnicodeEncodeError:
        print(line.encode("ascii", "replace").decode(), flush=True)
    except (OSError, ValueError):
        pass

# ---- codecs: how a delta is written
# Matrices in the codec's form; vectors, and what is smaller than a block, in fp32. The integer
# codecs keep (code - middle) * scale, with a scale for each block of 64 numbers. Scales are bf16,
# because fp16 would underflow at the size of deltas. Everything works on pieces of a tensor, so
# that no step needs a second copy of a large one.

BLOCK = 64
PIECE = 1 << 22         # numbers of a piece, 16 MB in fp32
CODECS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": 8, "int4": 4, "int2": 2}
MIDDLE = {8: 127, 4: 7, 2: 1.5}     # by the bits of a code


def return_freed_memory():
    """Large blocks go back to the system as soon as they are freed. By its own rules glibc keeps
    them, and small objects split them: 3 MB stayed for each delta that was read."""
    with contextlib.suppress(OSError, AttributeError):      # glibc only
        ctypes.CDLL(None).mallopt(-3, 1 << 20)              # M_MMAP_THRESHOLD


def shapes_of(tensors: dict) -> dict:
    return {k: tuple(v.shape) for k, v in tensors.items()}


def pieces(shapes: dict):
    """Yields (name, rows), which cut large tensors along their first dimension: tensor[rows] is a
    view of any tensor, however its memory is laid out. Cuts fall between blocks."""
    for name, shape in shapes.items():
        row = max(1, math.prod(shape[1:]))
        rows = max(1, PIECE // row // BLOCK) * BLOCK
        if not shape or shape[0] <= rows:
            yield name, ...
        else:
            for first in range(0, shape[0], rows):
                yield name, slice(first, min(first + rows, shape[0]))


def blocks_of(shape, rows):
    """The blocks that hold these rows."""
    if rows is ...:
        return rows
    row = math.prod(shape[1:])
    return slice(rows.start * row // BLOCK, math.ceil(rows.stop * row / BLOCK))


def stored_shapes(shapes: dict, codec: str) -> dict:
    """{name: (dtype, shape)} of the tensors in a file that holds tensors of these shapes."""
    stored, form = {}, CODECS[codec]
    for name, shape in shapes.items():
        numbers = math.prod(shape)
        if len(shape) < 2 or numbers < BLOCK:
            stored[name] = torch.float32, tuple(shape)
        elif isinstance(form, torch.dtype):
            stored[name] = form, tuple(shape)
        else:
            blocks = math.ceil(numbers / BLOCK)
            stored[name] = torch.uint8, (blocks, BLOCK * form // 8)
            stored["scale:" + name] = torch.bfloat16, (blocks, 1)
    return stored


def empty_stored(shapes: dict, codec: str) -> dict:
    return {k: torch.empty(shape, dtype=dtype)
            for k, (dtype, shape) in stored_shapes(shapes, codec).items()}


def bits_of(stored: dict, name: str) -> int:
    """Bits of a code; 0 for a tensor that is stored without codes."""
    return stored[name].shape[1] * 8 // BLOCK if "scale:" + name in stored else 0


def encode_piece(stored: dict, name: str, rows, values, shape):
    """Write the piece `values` of a tensor of this shape into `stored`."""
    bits = bits_of(stored, name)
    if not bits:
        stored[name][rows] = values.to(stored[name].dtype)
        return
    middle = MIDDLE[bits]
    blocks = F.pad(values.float().flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    if bits == 2:       # four levels reach furthest when a step is the block's standard deviation
        scale = torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / BLOCK ** 0.5
    else:               # with more, the largest number of the block gets the outermost code
        scale = blocks.abs().amax(1, keepdim=True) / middle
    scale = scale.bfloat16()
    codes = blocks / scale.float().clamp(min=1e-30)
    codes = codes.add_(middle).round_().clamp_(0, 2 * middle).to(torch.uint8)
    packed = codes[:, ::8 // bits].clone()
    for i in range(1, 8 // bits):
        packed |= codes[:, i::8 // bits] << (i * bits)
    where = blocks_of(shape, rows)
    stored[name][where], stored["scale:" + name][where] = packed, scale


def decode_piece(stored: dict, name: str, rows, shape):
    """Decode a piece to fp32, to the same bits on every machine."""
    bits = bits_of(stored, name)
    if not bits:
        return stored[name][rows].to(torch.float32, copy=True)
    where = blocks_of(shape, rows)
    codes = stored[name][where]
    blocks = torch.empty(len(codes), BLOCK)
    for i in range(8 // bits):
        blocks[:, i::8 // bits] = (codes >> (i * bits)) & (2 ** bits - 1)
    blocks.sub_(MIDDLE[bits]).mul_(stored["scale:" + name][where])
    shape = shape if rows is ... else (rows.stop - rows.start, *shape[1:])
    return blocks.flatten()[:math.prod(shape)].view(shape)


def encode(tensors: dict, codec: str) -> dict:
    """Whole tensors in the codec's form."""
    shapes = shapes_of(tensors)
    stored = empty_stored(shapes, codec)
    for name, rows in pieces(shapes):
        encode_piece(stored, name, rows, tensors[name][rows], shapes[name])
    return stored


def decode(stored: dict, shapes: dict) -> dict:
    """Whole tensors in fp32."""
    return {name: decode_piece(stored, name, ..., shape) for name, shape in shapes.items()}


def norm_of(stored: dict, shapes: dict) -> float:
    """Euclidean norm of what is stored, to six digits: the last bits may differ by machine. Not
    finite if a number is not, or if they are too large to be squared."""
    total = 0.0
    for name, rows in pieces(shapes):
        values = decode_piece(stored, name, rows, shapes[name])
        total += torch.linalg.vector_norm(values).item() ** 2
    return float(f"{math.sqrt(total):.6g}")


def save(tensors: dict, file: Path, header: dict | None = None) -> dict:
    """Write a safetensors file; its {"sha256", "size"}. Raises Unavailable if the disk is full."""
    try:
        save_file(tensors, file, metadata=header)
        return {"sha256": sha256(file), "size": file.stat().st_size}
    except (SafetensorError, OSError) as e:
        raise Unavailable(f"cannot write {file}: {e}") from e


def open_file(file: Path) -> tuple[dict, dict]:
    """(header, tensors) of a safetensors file: the tensors are mapped, not read. Raises ValueError
    with the reason."""
    try:
        with safe_open(file, "pt") as f:
            return f.metadata() or {}, {k: f.get_tensor(k) for k in f.keys()}
    except (SafetensorError, OSError, RuntimeError) as e:
        raise ValueError(f"unreadable, no safetensors file: {str(e).splitlines()[0]}") from None


def check_tensors(tensors: dict, expected: dict):
    """Compare with {name: (dtype, shape)}. Raises ValueError naming the first tensor that is
    missing, unknown or misshapen."""
    there = {k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()}
    for k in sorted(there.keys() | expected):
        if there.get(k) != expected.get(k):
            raise ValueError(f"tensor {k[:80]} is {there.get(k, 'missing')}, "
                             f"not {expected.get(k, 'wanted')}")


def open_coded(file: Path, shapes: dict) -> tuple[dict, dict]:
    """(header, stored tensors) of a delta or an update. Raises ValueError with the reason."""
    header, tensors = open_file(file)
    if header.get("codec") not in CODECS:
        raise ValueError(f"the header lacks something: codec is {header.get('codec')!r:.20}")
    check_tensors(tensors, stored_shapes(shapes, header["codec"]))
    return header, tensors


def open_plain(file: Path, shapes: dict | None = None) -> dict:
    """The tensors of a keyframe: all fp32, or all bf16. Without shapes, whatever there is. Raises
    ValueError with the reason."""
    _, tensors = open_file(file)
    rounded = any(v.dtype == torch.bfloat16 for v in tensors.values())
    dtype = torch.bfloat16 if rounded else torch.float32
    shapes = shapes or shapes_of(tensors)
    check_tensors(tensors, {name: (dtype, shape) for name, shape in shapes.items()})
    return tensors

# ---- trying again, and reading what others have written


def never() -> bool:
    return False


def wait(seconds: float, stopped):
    """Sleep, with jitter so that nodes do not march in step. Wake up early when stopped() holds."""
    end = time.monotonic() + seconds * random.uniform(0.8, 1.2)
    while time.monotonic() < end and not stopped():
        time.sleep(min(0.1, max(0.0, end - time.monotonic())))


def tell(error: str, retry_in: float):
    write_line(f"hub_error {error}; next try in {retry_in:.0f} s")


def retry(work, failed=tell, stopped=never):
    """work(), again and again while it raises Unavailable: after 1 s, 2 s, ... up to a minute, or
    what the repository asked for. failed(error, seconds to the next try) is told each time.

    Raises Unavailable once stopped() holds, and at once whatever another try cannot mend.
    """
    pause = 1.0
    while True:
        try:
            return work()
        except Unavailable as e:
            if stopped():
                raise
            seconds = max([pause, *e.args[1:]])
            failed(e.args[0], seconds)
            wait(seconds, stopped)
            pause = min(60.0, pause * 2)


class Patient:
    """A transport whose reading verbs are retried, as `retry` does it.

    keep: a commit is tried once. It may have been made although no answer came, and only the caller
    can find that out: it looks first and then repeats the commit, inside a `retry` of its own. A
    squash is tried once, too, because it can wait.
    """

    def __init__(self, transport, failed=tell, stopped=never):
        self.transport, self.failed, self.stopped = transport, failed, stopped

    def __getattr__(self, name):
        verb = getattr(self.transport, name)
        if name not in ("head", "read", "fetch", "list"):
            return verb

        def patient(*arguments):
            return retry(functools.partial(verb, *arguments), self.failed, self.stopped)
        return patient


def check_value(name: str, value, kind):
    """Raises ValueError for a value that is not of this type, or a number out of all bounds."""
    kinds = (int, float) if kind is float else kind
    right = isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)
    if isinstance(value, (int, float)):
        right = right and abs(value) < 10 ** 15 and not (kind is int and value < 0)
    if not right:
        raise ValueError(f"{name}={str(value)[:40]!r}: wants a plausible {kind.__name__}")


def read_value(name: str, value, kind):
    """The value of an annotated type, from JSON. Raises ValueError if it is of another."""
    if dataclasses.is_dataclass(kind):
        return read_record(kind, value)
    parts = typing.get_args(kind)
    if typing.is_typeddict(kind):
        check_value(name, value, dict)
        return {key: read_value(f"{name}.{key}", value.get(key), part)
                for key, part in kind.__annotations__.items()}
    if typing.get_origin(kind) is tuple:        # JSON has lists only
        check_value(name, value, list)
        return [read_value(name, v, part) for v, part in zip(value, parts, strict=True)]
    check_value(name, value, typing.get_origin(kind) or kind)
    if parts and isinstance(value, dict):
        return {key: read_value(f"{name}.{key}", v, parts[1]) for key, v in value.items()}
    return [read_value(name, v, *parts) for v in value] if parts else value


def read_record(kind, values: dict):
    """The dataclass of these values: what it does not know is left out, what is missing has its
    default. Raises ValueError for a wrong type, or where there is no default."""
    check_value(kind.__name__, values, dict)
    known = {}
    for item in dataclasses.fields(kind):
        empty = values.get(item.name) is None and item.default is None
        if item.name in values and not empty:
            known[item.name] = read_value(item.name, values[item.name], item.type)
    try:
        return kind(**known)
    except TypeError as e:      # it names what is missing
        raise ValueError(str(e)) from None


def read_header(kind, header: dict, **others):
    """The record in the header of a file, where all values are strings. `others`: the fields that
    are not read there. Raises ValueError."""
    values = {}
    try:
        for item in dataclasses.fields(kind):
            text = header.get(item.name)
            if text is None or item.name in others:
                continue
            if len(text) > 99:
                raise ValueError(f"{item.name} is {text[:40]}")
            values[item.name] = text == "True" if item.type is bool else item.type(text)
        return read_record(kind, {**values, **others})
    except ValueError as e:
        raise ValueError(f"the header lacks something: {e}") from None

# ---- transports
# | verb                                 | answer                                               |
# |--------------------------------------|------------------------------------------------------|
# | head()                               | (version, tag of global/step_count.json, or "")      |
# | read(path, version=None)             | (version, bytes; None: no such file), a small file   |
# | fetch(path, version, to, tag="")     | puts the file at `to`; FileNotFoundError: it is gone |
# | list(prefix, version=None)           | [(path, size in bytes, tag)] of the files below      |
# | commit(add, delete, expect, message) | the new version; add: {path: bytes, or a file}       |
# | squash()                             | forgets the history                                  |
#
# A commit is made whole or not at all. With `expect` it raises Conflict if that is not the head.
# With a bucket this holds for the repository alone. Objects are written before the commit, and
# nobody reads them until a state names them.
# A tag is a hash of the content: sha256, or git's sha1. fetch checks it. Version None: the newest.
# All verbs raise Unavailable for what can pass and Refused for what cannot.


def sha256(path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def matches_hash(content, tag: str) -> bool:
    """Whether bytes, or a file, are what the tag says."""
    if len(tag) == 64 and not isinstance(content, bytes):
        return tag == sha256(content)
    data = content if isinstance(content, bytes) else Path(content).read_bytes()
    return tag in (hashlib.sha256(data).hexdigest(),
                   hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


def inside(path: str) -> bool:
    """Whether a path names a file of a repository, on every system: relative, without "..", drive
    or backslash, not below .hub, and short enough for a file system."""
    parts = path.split("/")
    return (path.isprintable() and not set(path) & set("\\:") and len(path.encode()) <= 255
            and parts[0].casefold() != ".hub"
            and not any(part == "" or part.endswith((".", " ")) for part in parts))


def is_file(path) -> bool:
    """Whether there is a regular file: no link, no folder, nothing that could block a reader."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def link(source: Path, to: Path) -> Path:
    """Make `to` a second name for a file, or a copy of it where there are no hard links."""
    to.unlink(missing_ok=True)
    try:
        os.link(source, to)
    except FileNotFoundError:
        raise
    except OSError:         # another disk, or a file system without links
        shutil.copy2(source, to)        # with its time, by which a change is noticed
    return to


@dataclass
class Entry:
    """A file of a FolderTransport."""
    sha256: str
    size: int           # bytes
    mtime: float        # of the visible file; another one means that somebody has changed it


@dataclass
class Index:
    """One version of a FolderTransport: the content of .hub/index.json."""
    version: int = 0
    files: dict[str, Entry] = field(default_factory=dict)       # by path
    stale: list[str] = field(default_factory=list)  # paths that the visible files do not show yet

    def hashes(self) -> dict:
        return {path: entry.sha256 for path, entry in self.files.items()}


@functools.lru_cache(4)     # a look costs no parsing while nothing has changed
def parse_index(content: bytes) -> Index:
    """Raises ValueError if this is no index, or if it names anything outside the hub."""
    try:
        index = read_record(Index, json.loads(content))
    except RecursionError as e:
        raise ValueError(str(e)) from e
    for path in [*index.files, *index.stale]:
        if not inside(path):
            raise ValueError(f"{path[:80]!r} is no file of this hub")
    for digest in index.hashes().values():
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError(f"{digest[:80]} is no hash")
    return index


class FolderTransport:
    """The repository as a plain folder: one machine, or a shared file system with working locks.

        .hub/objects/<sha256>       each content once
        .hub/index.json             the version, and which content each path has
        global/..., nodes/...       the visible files: hard links to objects, for people

    Replacing index.json is the commit. Readers go by index and objects, so a kill at any moment
    leaves the old version or the new one. Whoever has the lock next brings the visible files up to
    date.

    The visible files may be changed by hand: a file put, edited or deleted in global/ or nodes/, a
    README.md, any file that a commit has brought. That counts as a commit. It is noticed by size
    and time, by whoever reads, lists or commits next. Without an index that can be read, the
    visible files are the newest version.

    There is no history: all verbs answer with the newest version. No link is followed, and no name
    that is read from the disk leads out of the folder.
    """
    least_poll, limited = 0.02, False       # seconds between looks; whether commits are counted

    def __init__(self, root):
        self.root = Path(str(root).removeprefix("file://")).expanduser()
        self.own = self.root / ".hub"
        self.objects, self.index = self.own / "objects", self.own / "index.json"
        self.lock = FileLock(self.own / "lock")

    @contextlib.contextmanager
    def errors(self):
        """What the disk says, in the transports' terms."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as e:
            what = f"{e.filename or self.root}: {e.strerror or e}"
            if e.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR,
                           errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG):
                raise Refused(what) from e
            raise Unavailable(what) from e      # a full disk, a lost drive, a lock not had in time

    @contextlib.contextmanager
    def locked(self):
        for place in (self.own, self.objects, self.own / "lock"):
            if place.is_symlink():      # what is written there would be written elsewhere
                raise Refused(f"{place} is a link, which a hub does not follow: remove it")
        self.objects.mkdir(parents=True, exist_ok=True)
        with self.lock.acquire(timeout=60):
            self.remove(self.own.glob("new_*"))     # what a kill or a full disk has left
            yield

    def remove(self, files):
        for file in files:
            with contextlib.suppress(OSError):      # a folder; what cannot be removed
                file.unlink()

    # the index

    def load(self) -> Index:
        """The index; an empty one if there is none that can be read."""
        try:
            return parse_index(self.index.read_bytes()) if is_file(self.index) else Index()
        except ValueError:
            return Index()

    def now(self) -> Index:
        """The newest version. The lock is needed only if there is something to settle."""
        index = self.load()
        if self.by_hand(index) == index and not index.stale:
            return index
        with self.locked():
            return self.settle()

    def settle(self) -> Index:
        """With the lock: finish what a killed process has begun, take in what people have done by
        hand. Returns the newest version."""
        index = self.load()
        if not index.version and os.path.lexists(self.index):
            write_line(f"notice   {self.index} cannot be read: going on with the files that are "
                       f"there")
        # keep: this comes first. Until its files are shown, an interrupted commit looks like a
        # change by hand that undoes it
        if index.stale:
            return self.show(index)
        found = self.by_hand(index)
        if found == index:
            return index
        for path, entry in found.files.items():
            if not is_file(self.objects / entry.sha256):
                self.put(link(self.root / path, self.new()), f".hub/objects/{entry.sha256}")
        return self.save(found)

    def save(self, index: Index) -> Index:
        """Make a version, whose objects are there, the newest one. Other objects go."""
        self.put(self.write(json.dumps(dataclasses.asdict(index)).encode()), ".hub/index.json")
        needed = set(index.hashes().values())
        self.remove(file for file in self.objects.iterdir() if file.name not in needed)
        return index

    # the visible files

    def visible(self, known):
        """Yields the paths of the visible files that count; `known`: the paths of the hub."""
        def failed(error):
            if not isinstance(error, FileNotFoundError):
                raise error
        tops = {"global", "nodes", PAGE, *(path.split("/")[0] for path in known)}
        for folder, folders, names in os.walk(self.root, onerror=failed):
            if folder == str(self.root):
                folders[:], names = tops.intersection(folders), tops.intersection(names)
            for file in [Path(folder, name) for name in names]:
                path = file.relative_to(self.root).as_posix()
                if inside(path) and is_file(file):
                    yield path

    def by_hand(self, index: Index) -> Index:
        """This version, or a new one if people have changed the visible files."""
        files = {}
        for path in self.visible(index.files):
            with contextlib.suppress(FileNotFoundError):    # it may go while it is looked at
                entry, status = index.files.get(path), os.lstat(self.root / path)
                if not entry or (status.st_size, status.st_mtime) != (entry.size, entry.mtime):
                    entry = Entry(sha256(self.root / path), status.st_size, status.st_mtime)
                files[path] = entry
        found = Index(index.version, files, index.stale)
        if found.hashes() == index.hashes():
            return found            # touched or copied, but not changed: the same version
        # without an index: a number above any that it may have had
        newest = max((entry.mtime for entry in files.values()), default=0)
        return Index(index.version + 1 if index.version else int(newest), files)

    def show(self, index: Index) -> Index:
        """Bring the visible files up to date. Returns the index without stale paths."""
        for path in set(index.stale) - index.files.keys():
            self.make_way(path)
            (self.root / path).unlink(missing_ok=True)
        for path in set(index.stale) & index.files.keys():
            self.put(link(self.objects / index.files[path].sha256, self.new()), path)
        return self.save(dataclasses.replace(index, stale=[]))

    # writing: a file is made whole in .hub, and then moved to its place

    def make_way(self, path: str):
        """Move aside what stands in a file's way: a file where a folder has to be, or anything but
        a file at its path."""
        parts = path.split("/")
        for i in range(len(parts)):
            place, last = self.root.joinpath(*parts[:i + 1]), i + 1 == len(parts)
            right = is_file(place) if last else place.is_dir() and not place.is_symlink()
            if os.path.lexists(place) and not right:
                aside = self.own / f"aside_{time.time_ns()}"
                os.rename(place, aside)
                write_line(f"notice   {place} was in the way of a file; it is now {aside}")

    def new(self) -> Path:
        return self.own / f"new_{os.urandom(8).hex()}"

    def put(self, new: Path, path: str):
        self.make_way(path)
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, self.root / path)

    def write(self, content) -> Path:
        """A new file of bytes, or a copy of a file, that is on the disk."""
        source = io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb")
        with source, open(self.new(), "xb") as f:
            shutil.copyfileobj(source, f, 1 << 20)
            f.flush()
            os.fsync(f.fileno())
        return Path(f.name)

    def store(self, content) -> Entry:
        """Keep bytes, or a copy of a file, as an object."""
        new = self.write(content)
        digest, status = sha256(new), new.stat()
        self.put(new, f".hub/objects/{digest}")
        return Entry(digest, status.st_size, status.st_mtime)

    # the verbs

    def head(self):
        with self.errors():
            index = self.now()
        return str(index.version), index.hashes().get(STEP, "")

    def read(self, path: str, version=None):
        with self.errors():
            index = self.now()
            if path not in index.files:
                return str(index.version), None
            digest = index.files[path].sha256
            kept = self.objects / digest
            with contextlib.suppress(FileNotFoundError):    # it may go while it is looked at
                content = kept.read_bytes() if is_file(kept) else b""
                if matches_hash(content, digest):
                    return str(index.version), content
            if self.now() != index:         # a commit has come between
                return self.read(path)
            raise Refused(f"{kept} is damaged: it is not what the hub holds. Delete "
                          f"{self.root / path}, or put a sound file there")

    def fetch(self, path: str, version, to: Path, tag: str = ""):
        with self.errors():
            entry = self.now().files.get(path)
            if entry is None:
                raise FileNotFoundError(f"{self.root / path} is gone")
            kept = self.objects / entry.sha256
            if not (is_file(kept) and matches_hash(kept, tag or entry.sha256)):
                # replaced since the state was read, or damaged
                raise Unavailable(f"{self.root / path} is not what {STEP} says")
            to.parent.mkdir(parents=True, exist_ok=True)
            link(kept, to)

    def list(self, prefix: str, version=None):
        folder = prefix.rstrip("/") + "/" if prefix else ""
        with self.errors():
            files = self.now().files
        return [(path, entry.size, entry.sha256) for path, entry in sorted(files.items())
                if path.startswith(folder)]

    def commit(self, add: dict, delete=(), expect=None, message="") -> str:
        for path in [*add, *delete]:
            if not inside(path):
                raise Refused(f"{path} is no path in the repository")
        with self.errors(), self.locked():
            index = self.settle()
            if expect is not None and str(index.version) != expect:
                raise Conflict(f"{self.root} is at {index.version}, not {expect}")
            stored = {content: self.store(content) for content in set(add.values())}
            files = {path: entry for path, entry in index.files.items() if path not in delete}
            files |= {path: stored[content] for path, content in add.items()}
            index = Index(index.version + 1, files, [*delete, *add])
            self.show(self.save(index))     # once it is saved, the commit is made
            return str(index.version)

    def squash(self):
        """A folder keeps no history."""


def object_name(path: str, digest: str) -> str:
    """The name of a file in a bucket. It holds the hash, and so it is never overwritten: what a
    killed master or the second of two masters has left there is not taken for anything else."""
    stem, end = os.path.splitext(path)
    return f"{stem}.{digest}{end}" if digest else path


def path_of(name: str) -> tuple[str, str]:
    """(path, hash) of an object. The hash is empty for an object that is not ours."""
    match = re.fullmatch(r"(.+)\.([0-9a-f]{64})(\.[^./]*)?", name)
    return (match[1] + (match[3] or ""), match[2]) if match else (name, "")


def require_buckets(hub):
    """Raises Refused if the client cannot use them."""
    if not hasattr(hub.HfApi, "batch_bucket_files"):
        raise Refused("buckets need huggingface_hub 1.5: pip install -U huggingface_hub")
    try:
        importlib.import_module("hf_xet")
    except ImportError:
        raise Refused("buckets need the package hf_xet: pip install hf_xet") from None
    if hub.constants.HF_HUB_DISABLE_XET:
        raise Refused("buckets need Xet: unset HF_HUB_DISABLE_XET")


def what_it_says(e, response) -> tuple[int, str]:
    """(HTTP status, or 0; the words) of an exception of the client."""
    words = " ".join((getattr(e, "server_message", None) or str(e)).split())
    words = re.split(r" for url| \(Request ID| For more", words)[0][:160].rstrip(".")
    if response is not None:
        return response.status_code, words
    found = re.search(r"\b(401|403|404(?= Not Found))\b", words)       # from hf_xet, in words only
    return int(found[0]) if found else 0, words


class HubTransport:
    """The repository as a model repo on the Hugging Face Hub, through huggingface_hub 1.0 or later.

    With a bucket, what IN_BUCKET names lies in a Storage Bucket beside the repo: no commits, no
    history, and deletion frees space at once. A bucket has no transactions, and none is needed:
    objects are written first, then comes the one commit of the state, which names them with their
    hashes, and deletions come last. An object that outlives its deletion is deleted later.

    The client retries no commit, waits for ever on a silent server, takes an old file for a new one
    when a HEAD fails and checks only sizes: hence a timeout, our own retry (above), a resolved
    commit for every read and a hash for every file. The token is the client's own: HF_TOKEN, or the
    login.
    """
    least_poll = 2.0

    def __init__(self, repo: str, create=False, private=True, bucket=""):
        import huggingface_hub as hub
        self.hub, self.repo, self.api = hub, repo, hub.HfApi()
        if hub.constants.HF_HUB_OFFLINE:
            raise Refused(f"{repo}: HF_HUB_OFFLINE is set, so the Hub is not asked: unset it, or "
                          f"use a folder (--hub=./runs/hub)")
        # what the client raises: httpx's or httpx2's error, by version; RuntimeError: an upload
        # that failed; KeyError, TypeError: a proxy's own page; ValueError: a bad name of a repo, a
        # page with bad metadata, an LFS server's no
        self.trouble = (hub.errors.HfHubHTTPError.__bases__[0], OSError, RuntimeError, KeyError,
                        TypeError, ValueError)
        self.committed, self.denied = False, 0      # whether one was made; 403s since the last one
        self.is_master, self.private = False, private
        self.bucket = None              # its name, or ""; not known before a state is read
        self.named = set()              # the objects that the state names
        self.seen = {}                  # {object: its path}, as listed last
        self.spoilt = Counter()         # how often a file has arrived damaged
        hub.set_client_factory(self.client)
        hub.utils.disable_progress_bars()
        hub.utils.logging.set_verbosity_error()     # what goes wrong is told here, once
        if create:
            retry(functools.partial(self.create, bucket))

    @staticmethod
    def client():
        """The client's own HTTP client, with a timeout."""
        from huggingface_hub.utils import _http
        client = _http.default_client_factory()
        client.timeout = 60
        return client

    @property
    def limited(self) -> bool:
        """Whether commits are counted: a worker makes none if there is a bucket."""
        return self.is_master or not self.bucket

    def create(self, bucket: str):
        """Make the repository, and a bucket for a new swarm. Where there can be no bucket, the
        repository alone will do."""
        with self.errors():
            self.api.create_repo(self.repo, private=self.private, exist_ok=True)
        if self.read(STEP)[1] is not None:      # a swarm that runs keeps what its state says
            if bucket not in ("auto", self.bucket):
                write_line(f"notice   --bucket={bucket} counts for a new swarm only: this one "
                           f"keeps {self.bucket or 'all in the repository'}")
            return
        self.bucket, name = "", f"{self.repo}-swarm" if bucket == "auto" else bucket
        try:
            if name:
                require_buckets(self.hub)
                self.create_bucket(name)
                self.bucket = name
        except Refused as e:
            write_line(f"notice   no bucket {name} ({e}): all goes to the repository, where each "
                       f"delta is a commit, and stays in its history")

    def create_bucket(self, name: str):
        with self.errors():
            self.api.create_bucket(name, private=self.private, exist_ok=True)

    # what the client's exceptions mean

    @contextlib.contextmanager
    def errors(self):
        """What can pass is Unavailable, what cannot is Refused, a moved head is a Conflict, a file
        or a version that is not there is a FileNotFoundError."""
        try:
            yield
        except self.trouble as e:
            while not isinstance(e, self.hub.errors.HfHubHTTPError) and e.__cause__:
                e = e.__cause__
            raise self.meaning(e, getattr(e, "response", None)) from e

    def meaning(self, e, response) -> Exception:
        """The exception of ours for one of the client's, with what the Hub says."""
        (status, words), errors = what_it_says(e, response), self.hub.errors
        told = f"{self.repo}: {status or type(e).__name__} {words}"
        if getattr(response, "history", None) and self.has_moved():
            return Unavailable(f"the repository is {self.repo} now: start with "
                               f"--hub={self.repo} next time")
        if isinstance(e, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
            return FileNotFoundError(told)
        at_bucket = response is None or "/buckets/" in str(response.url)
        if self.bucket and status == 404 and at_bucket:
            return self.bucket_gone()
        if isinstance(e, ValueError) and not isinstance(e, json.JSONDecodeError):
            status = status or 400      # a bad name, or an LFS server's list of errors
        # a quota speaks through the Hub's own 403, too
        full = re.search(r"\b(storage|quota|limits?)\b", words, re.IGNORECASE)
        if full and status in (400, 402, 403, 413):
            return StorageFull(told, 60.0)
        if status == 412:
            return Conflict(told)
        if status == 403 and self.committed:
            # keep: it took commits before, and too many pushes at once may get a 403, too
            return self.denial(told)
        # a bucket's batch that failed in part may be repeated, whatever its status
        if status in (400, 401, 402, 403, 404, 413, 422) and not hasattr(e, "failures"):
            told += "; is HF_TOKEN set, and may it write?"
            if isinstance(e, errors.GatedRepoError):
                return Refused(told)
            unknown = isinstance(e, errors.RepositoryNotFoundError)
            return NoRepository(told) if unknown else Refused(told)
        headers = {} if response is None else response.headers
        asked = (re.fullmatch(r"(\d+)", headers.get("Retry-After", ""))
                 or re.search(r"r=0;t=(\d+)", headers.get("RateLimit", "")))
        if asked:
            return Unavailable(told, float(asked[1]))
        return Unavailable(told, 60.0 if status == 429 else 0.0)

    def bucket_gone(self) -> Exception:
        gone = self.denial(f"{self.bucket}: there is no such bucket, or none that this token may "
                           f"write to; a master that runs makes it again")
        if self.is_master and isinstance(gone, Unavailable):
            self.create_bucket(self.bucket)     # what was in it is published or sent again
        return gone

    def denial(self, told: str) -> Exception:
        """For what may pass, but not if it comes again and again."""
        self.denied += 1
        if self.denied > DENIALS:
            return Refused(told)
        return Unavailable(told, 10.0 * self.denied)

    def has_moved(self) -> bool:
        """Whether the repository has another name now: a GET is sent on, a POST is not."""
        name = self.repo
        with contextlib.suppress(*self.trouble):
            self.repo = self.api.repo_info(name).id
        return name != self.repo

    # the verbs: a path is in the repository or in the bucket

    def holds(self, path: str) -> bool:
        """Whether the bucket holds this path."""
        if self.bucket is None:
            self.read(STEP)
        return bool(self.bucket and IN_BUCKET.match(path))

    def read(self, path: str, version=None):
        version, content = self.repo_read(path, version)
        if path == STEP and content:
            self.learn(content)
        return version, content

    def learn(self, content: bytes):
        """Take the names of the bucket and its objects from a state; a damaged one says nothing."""
        try:
            state = parse_state(content)
        except Refused:
            return
        if state.bucket:
            require_buckets(self.hub)
        self.bucket = state.bucket
        self.named = {object_name(path, file["sha256"]) for path, file in state.files.items()}

    def fetch(self, path: str, version, to: Path, tag: str = ""):
        in_bucket = self.holds(path)
        to.parent.mkdir(parents=True, exist_ok=True)
        # fresh: nothing stale, bounded disk
        with self.errors(), tempfile.TemporaryDirectory(dir=to.parent) as fresh:
            get, at = (self.bucket_get, tag) if in_bucket else (self.repo_get, version)
            file = get(path, at, fresh)
            right = not tag or matches_hash(file, tag)
            if right:
                # keep: a new file, never new bytes in the old one, which may be mapped
                os.replace(file, to)
        if not right:
            self.spoilt[path, tag] += 1
            if path.startswith("nodes/") and self.spoilt[path, tag] > 2:
                raise ValueError("the content is not what its name says")
            raise Unavailable(f"{self.repo}: {path} arrived damaged")

    def list(self, prefix: str, version=None):
        found = [] if self.holds(prefix) else self.repo_list(prefix, version)
        return found + self.bucket_list(prefix) if self.bucket else found

    def commit(self, add: dict, delete=(), expect=None, message="update") -> str:
        """Files for the bucket alone make no new version."""
        self.bucket_put({path: content for path, content in add.items() if self.holds(path)})
        files = {path: content for path, content in add.items() if not self.holds(path)}
        deletions = [path for path in delete if not self.holds(path)]
        version = expect or ""
        if files or deletions:
            version = self.repo_commit(files, deletions, expect, message)
        if STEP in add:
            self.is_master = True
            self.learn(add[STEP])
        self.bucket_delete(delete, STEP in add)
        return version

    # in the bucket

    def bucket_list(self, prefix: str) -> list:
        prefix = prefix.rstrip("/") + "/" if prefix else ""
        with self.errors():
            tree = list(self.api.list_bucket_tree(self.bucket, prefix or None, recursive=True))
        tree = [item for item in tree if hasattr(item, "size")]
        self.seen = {name: path for name, path in self.seen.items() if not name.startswith(prefix)}
        self.seen |= {item.path: path_of(item.path)[0] for item in tree}
        # of two objects for one path the one that the state names counts, else the newer one
        tree.sort(key=lambda item: (item.path in self.named, str(item.uploaded_at)))
        found = {self.seen[item.path]: (item.size, path_of(item.path)[1]) for item in tree}
        return [(path, *found[path]) for path in sorted(found)]

    def bucket_get(self, path: str, digest: str, folder: str) -> Path:
        """One GET."""
        from huggingface_hub.file_download import http_get
        name, file = quote(object_name(path, digest)), Path(folder, "object")
        with open(file, "wb") as f:
            http_get(f"{self.api.endpoint}/buckets/{self.bucket}/resolve/{name}", f,
                     headers=self.hub.utils.build_hf_headers())
        return file

    def bucket_put(self, objects: dict):
        """Write objects. A batch that failed in part is repeated, which uploads nothing again."""
        add = []
        for path, content in objects.items():
            data = isinstance(content, bytes)
            digest = hashlib.sha256(content).hexdigest() if data else sha256(content)
            add.append((content if data else str(content), object_name(path, digest)))
        if add:
            with self.errors():
                self.api.batch_bucket_files(self.bucket, add=add)
            self.committed, self.denied = True, 0

    def bucket_delete(self, paths, sweep: bool):
        """Delete these. With `sweep`, also the objects of the global model that the state does not
        name; but none that came after the last listing, because a coming state may name it. What
        is left over is deleted by whoever sees it next."""
        dead = [name for name, path in self.seen.items() if path in paths
                or sweep and path.startswith("global/") and name not in self.named]
        if dead and self.bucket:
            with contextlib.suppress(Unavailable, Refused, FileNotFoundError), self.errors():
                self.api.batch_bucket_files(self.bucket, delete=dead)
            self.seen = {name: path for name, path in self.seen.items() if name not in dead}

    # in the repository

    def head(self):
        """One HEAD: on main, the answer for any path names the newest commit."""
        try:
            with self.errors():
                answer = self.hub.get_hf_file_metadata(self.hub.hf_hub_url(self.repo, STEP))
            if not (answer.commit_hash and answer.etag):
                raise Unavailable(f"{self.repo}: the answer is not a Hub's")
            return answer.commit_hash, answer.etag
        except FileNotFoundError:
            with self.errors():
                return self.api.repo_info(self.repo).sha, ""

    def repo_read(self, path: str, version):
        """One GET, whose answer names the commit and the hash."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
        try:
            with self.errors():
                url = self.hub.hf_hub_url(self.repo, path, revision=version)
                answer = get_session().get(url, headers=build_hf_headers())
                hf_raise_for_status(answer)
        except FileNotFoundError:
            version = version or self.head()[0]
            # keep: a cache may say so for a moment, and a master would begin a new run
            if path in [there for there, _, _ in self.repo_list(os.path.dirname(path), version)]:
                raise Unavailable(f"{self.repo}: {path} is there and was not found") from None
            return version, None
        # a large file comes from a second server; the Hub's own headers are in the first answer
        first = next((a for a in answer.history if "X-Repo-Commit" in a.headers), answer)
        tag = first.headers.get("X-Linked-ETag") or first.headers.get("ETag", "")
        whole = matches_hash(answer.content, tag.removeprefix("W/").strip('"'))
        if not whole or "X-Repo-Commit" not in first.headers:       # or a proxy's own page
            raise Unavailable(f"{self.repo}: {path} arrived damaged")
        return first.headers["X-Repo-Commit"], answer.content

    def repo_get(self, path: str, version, folder: str) -> str:
        return self.hub.hf_hub_download(self.repo, path, revision=version, local_dir=folder)

    def repo_list(self, prefix: str, version) -> list:
        try:
            with self.errors():
                tree = list(self.api.list_repo_tree(self.repo, prefix.rstrip("/"), recursive=True,
                                                    revision=version))
        except FileNotFoundError:
            return []                           # no such folder yet
        return [(f.path, f.size, f.lfs.sha256 if f.lfs else f.blob_id)
                for f in tree if hasattr(f, "size")]

    def repo_commit(self, add: dict, delete, expect, message: str) -> str:
        # keep: made anew for each try, or a lost answer doubles it
        operations = {path: self.hub.CommitOperationAdd(
            path, content if isinstance(content, bytes) else str(content))
            for path, content in add.items()}
        deletions = [self.hub.CommitOperationDelete(path, is_folder=False) for path in delete]
        try:
            with self.errors():
                if MODEL in add and WEIGHTS in add:
                    # one file under two names: once it is there, its twin needs no upload
                    self.api.preupload_lfs_files(self.repo, [operations[WEIGHTS]])
                version = self.api.create_commit(self.repo, [*operations.values(), *deletions],
                                                 commit_message=message, parent_commit=expect).oid
        except (Conflict, FileNotFoundError) as e:
            # the Hub may say 412 to overlapping commits that asked for no head, too
            if expect is None:
                raise Unavailable(str(e)) from e
            raise Conflict(str(e)) from e
        self.committed, self.denied = True, 0
        return version

    def squash(self):
        """Forget the history: overwritten weights stop counting against the quota."""
        with self.errors():
            self.api.super_squash_history(self.repo)


def poll_interval(settings: dict, transport, *loops: float) -> float:
    """Seconds between two looks: a tenth of the shortest inner loop, if not set."""
    tenth = min(loops, default=0.0) / 10
    return settings["poll_interval"] or min(30.0, max(transport.least_poll, tenth))


def open_hub(name: str, create=False, private=True, bucket=""):
    """The transport that --hub names: a folder (starts with . / ~ or file://), or user/name on the
    Hub. Raises ValueError for any other name. With `create`, a repo on the Hub is made if there is
    none, and for a new swarm a bucket: user/name, or "auto" for the repo's name and -swarm."""
    if bucket not in ("", "auto") and not re.fullmatch(r"[\w.-]+/[\w.-]+", bucket):
        raise ValueError(f"distributed.bucket={bucket}: wants auto, user/name, or nothing")
    if name.startswith((".", "/", "~", "file://")):
        return FolderTransport(name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return HubTransport(name, create, private, bucket)
    raise ValueError(f"distributed.hub={name}: wants a folder (./runs/hub) "
                     f"or a Hub repo (user/name)")

# ---- what is published


@dataclass
class Delta:
    """A pseudo-gradient on its way. The worker writes it; every field but the last five is in the
    header of its file."""
    run_id: str                 # of the swarm
    node_id: str
    incarnation: str            # the process that sends it; a later one compares greater
    local_step: int             # the step after which it was taken; names the file
    base_outer_step: int        # the global model it started from
    steps: int                  # optimizer steps since the delta before
    tokens: int                 # trained in these steps, and in those sent again
    loss: float                 # mean training loss of these steps
    codec: str
    lineage: str = ""           # the first process of this run folder
    first_step: int = 0         # the step at which the lineage joined
    again: int = 0              # steps in it that were reported lost before
    seconds: float = 0.0        # since the delta before
    final: bool = False         # the node has ended its run
    shapes: dict = None         # of the tensors
    stored: dict = None         # the coded tensors, mapped from the file once that is written
    bytes: int = 0              # of the file
    norm: float = 0.0           # Euclidean, set by the master
    scale: float = 1.0          # set by the master, below 1 for an outsized delta

    def __post_init__(self):
        self.lineage = self.lineage or self.incarnation

    def header(self) -> dict:
        names = [item.name for item in dataclasses.fields(self)][:-5]
        return {name: str(getattr(self, name)) for name in names}

    @classmethod
    def open(cls, file: Path, shapes: dict):
        """The delta in a file. Raises ValueError with the reason if there is none."""
        header, stored = open_coded(file, shapes)
        return read_header(cls, header, shapes=shapes, stored=stored, norm=0.0, scale=1.0,
                           bytes=os.path.getsize(file))

    def piece(self, name: str, rows):
        """A decoded piece of it."""
        return decode_piece(self.stored, name, rows, self.shapes[name])


class Published(TypedDict):
    """A file of the global model."""
    sha256: str
    size: int                   # bytes


class Refusal(TypedDict):
    """A delta that was not merged."""
    number: int                 # counts the refusals of a node
    local_step: int
    reason: str
    restart: bool               # the node starts again from the global model


@dataclass
class NodeState:
    """What the master has recorded of a node. Only the master writes it."""
    lineage: str = ""           # of its newest delta
    incarnation: str = ""       # of its newest delta: older processes are shut out
    local_step: int = 0         # up to here its work is merged, or reported lost
    steps: int = 0              # merged
    lost: int = 0               # steps that never came, or were refused
    gaps: list[tuple[int, int]] = field(default_factory=list)   # after, up to: lost, may come again
    tokens: int = 0             # merged
    loss: float = None          # training loss of its newest delta
    norm: float = 0.0           # of its newest delta, scaled, as of a whole inner loop
    outer_step: int = 0         # the last round it contributed to
    base_outer_step: int = 0    # the global model its newest delta started from
    seconds: float = 0.0        # of its last inner loop, by its own clock
    pace: float = 0.0           # seconds of a step in that loop
    waited: float = 0.0         # seconds that its newest delta waited for the last of a round
    final: bool = False         # it has ended its run
    last_seen: float = 0.0      # when the master had its newest delta, Unix time
    above: int = 0              # deltas in a row whose loss was far above the swarm's
    refusals: int = 0           # of its deltas, ever
    refused: list[Refusal] = field(default_factory=list)    # the newest of these


@dataclass
class SwarmState:
    """global/step_count.json: the single commit point. Only the master writes it."""
    run_id: str
    outer_step: int = 0
    keyframe: int = 0           # the outer step of global/latest.safetensors
    files: dict[str, Published] = field(default_factory=dict)
    nodes: dict[str, NodeState] = field(default_factory=dict)
    config: dict = field(default_factory=dict)      # settings for the workers
    buffers: list[str] = field(default_factory=list)    # averaged, without momentum
    progress: int = 0           # mean local step of the nodes: where a joining node begins
    momentum: float = 0.0       # mu of the coming round
    outer_lr: float = 0.7       # of the coming round
    part: float = 1.0           # part of the nodes that contribute, mean of the newest rounds
    finished: bool = False      # the nodes send what they have, and end
    master: str = ""            # changes when another master takes over
    published: float = 0.0      # Unix time at the master
    bucket: str = ""            # holds what IN_BUCKET names; empty: all is in the repository
    commits: list[float] = field(default_factory=list)  # Unix times of the last two hours
    committed: int = 0          # bytes since the history was squashed
    strange: int = 0            # files below nodes/ that were no deltas, deleted
    former: dict[str, int] = field(default_factory=dict)    # sums over nodes that have left
    # outer step, step, training loss, norm of the update, names of the nodes
    curve: list[tuple[int, int, float, float, str]] = field(default_factory=list)
    # outer step, step, validation loss
    val: list[tuple[int, int, float]] = field(default_factory=list)

    def content(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), indent=1).encode()


RECOVER = ("put back a version of it from the repository's history; or empty global/, if what was "
           "trained may go")


def parse_state(content: bytes) -> SwarmState:
    """The published state. Raises Refused where there is none."""
    try:
        state = read_record(SwarmState, json.loads(content))
        for path in itertools.chain([WEIGHTS, MOMENTUM], updates_after(state.keyframe, state)):
            state.files[path]
        if not (0 <= state.momentum < 1 and state.outer_lr > 0 and 0 < state.part <= 1):
            raise ValueError(f"momentum is {state.momentum}, outer_lr {state.outer_lr}")
        return state
    except (ValueError, KeyError, RecursionError) as e:
        raise Refused(f"{STEP} is not what a master of this program writes "
                      f"({type(e).__name__} {str(e)[:60]}): {RECOVER}") from None


@dataclass
class Update:
    """What one outer step changed: u, coded. The header says how the momentum follows from it."""
    f: float                    # part of the nodes that contributed
    mu: float                   # outer momentum of the round
    decay: float                # mu ** f, as the master's machine computes it
    outer_lr: float
    keyframe: bool              # the momentum was rounded to bf16 after it
    codec: str
    buffers: list               # names without momentum
    shapes: dict
    stored: dict

    @classmethod
    def open(cls, file: Path, shapes: dict, buffers: list):
        """Raises ValueError if the file is no update, or holds numbers that are not finite."""
        header, stored = open_coded(file, shapes)
        update = read_header(cls, header, buffers=buffers, shapes=shapes, stored=stored)
        if not (0 < update.f <= 1 and 0 <= update.mu < 1 and 0 <= update.decay <= 1
                and update.outer_lr > 0):
            raise ValueError(f"f={update.f}, mu={update.mu}, outer_lr={update.outer_lr} are not "
                             f"those of an outer step")
        if not norm_of(stored, shapes) < math.inf:
            raise ValueError("it holds numbers that are not finite")
        return update

    def piece(self, name: str, rows):
        """A decoded piece of u."""
        return decode_piece(self.stored, name, rows, self.shapes[name])


def outer_momentum(settings: dict, outer_step: int, rounds_left: float = math.inf) -> float:
    """mu of the round that follows outer_step. It grows over the first outer_warmup rounds.

    It falls over the last three. Nesterov's weights stand ahead, where the momentum would carry
    them next; at the end there is no next round. (Validation loss 1.5296 instead of 1.5386.)
    """
    warmup = settings["outer_warmup"]
    grown = min(1.0, (outer_step + 1) / warmup) if warmup else 1.0
    return settings["outer_momentum"] * min(grown, rounds_left / LAST_ROUNDS)


def nesterov(g, buf, update: Update):
    """What an outer step takes off the weights. With f = 1 this is torch.optim.SGD(nesterov=True).

        u = outer_lr * (g + f * mu * (mu**f * buf + g))
    """
    return (buf * update.decay).add_(g).mul_(update.f * update.mu).add_(g).mul_(update.outer_lr)


def fold(update: Update, name: str, rows, weight, buf):
    """Take a piece of the global model, (weight, buf), over one published update, in place.

        W   = W - u
        buf = (u / outer_lr + mu**f * buf) / (1 + f * mu)       the outer step, solved for buf

    With an exact codec buf is Nesterov's momentum. With a coded update it is the momentum of the
    path that was really taken: master and workers need no other record of it.
    """
    u = update.piece(name, rows)
    weight.sub_(u)
    if name in update.buffers:
        return
    share = 1 / (1 + update.f * update.mu)
    # keep: products and the sum one by one, because a fused operation rounds otherwise, and not
    # on every machine
    buf.mul_(update.decay * share).add_(u.mul_(share / update.outer_lr))
    if update.keyframe:
        buf.copy_(buf.bfloat16())


@dataclass
class Arrival:
    """The files of a newer global model, fetched and checked: the updates since the one before, or
    a keyframe and the updates after it."""
    version: str
    state: SwarmState
    keyframe: dict = None       # weights, mapped; None if the updates lead there
    momentum: dict = None       # of the keyframe
    updates: list = field(default_factory=list)     # in order

    def advance(self, name: str, rows, weight, buf):
        """Move a piece of the global model there, in place."""
        if self.keyframe is not None:
            weight.copy_(self.keyframe[name][rows])
            buf.copy_(self.momentum[name][rows])
        for update in self.updates:
            fold(update, name, rows, weight, buf)

    def tensors(self) -> tuple:
        """(weights, momentum) of the whole global model, fp32, from its keyframe."""
        weights, momentum = {}, {}
        for name, value in self.keyframe.items():
            weights[name], momentum[name] = torch.empty(value.shape), torch.empty(value.shape)
        for name, rows in pieces(shapes_of(weights)):
            self.advance(name, rows, weights[name][rows], momentum[name][rows])
        return weights, momentum


def read_state(transport, failed=tell, stopped=never) -> tuple:
    """(version, state) of the newest global model; waits, saying so, while there is none. Raises
    Unavailable once stopped() holds."""
    patient, told = Patient(transport, failed, stopped), ""
    while not stopped():
        try:
            version, content = patient.read(STEP)
            what = "a global model"
        except NoRepository as e:
            content, what = None, str(e)
        if content is not None:
            return version, parse_state(content)
        if what != told:
            write_line(f"waiting  for {what}; is master.py running on this hub?")
        told = what
        wait(2.0, stopped)
    raise Unavailable("stopped before there was a global model")


def updates_after(outer_step: int, state: SwarmState):
    """The names of the updates from outer_step to `state`, one by one."""
    return map(UPDATE.format, range(outer_step + 1, state.outer_step + 1))


def way_to(state: SwarmState, since: SwarmState | None) -> list:
    """The files that lead to `state`: from the global model of `since` the updates, if all are
    there, else the keyframe and the updates after it."""
    if since is not None and since.run_id == state.run_id:
        if all(path in state.files for path in updates_after(since.outer_step, state)):
            return list(updates_after(since.outer_step, state))
    return [WEIGHTS, MOMENTUM, *updates_after(state.keyframe, state)]


def fetch_global(transport, at: str, state: SwarmState, folder: Path, shapes=None,
                 since: SwarmState | None = None) -> Arrival:
    """The files that lead to `state`, from the global model of `since` if updates do. Without
    shapes, whatever tensors the keyframe has.

    Raises Unavailable if they are gone or do not arrive whole, Refused if they are not this model.
    """
    arrival = Arrival(at, state)
    for path in way_to(state, since):
        file = folder / path.replace("/", "_")
        try:
            transport.fetch(path, at, file, state.files[path]["sha256"])
            if path == WEIGHTS:
                arrival.keyframe = open_plain(file, shapes)
                shapes = shapes_of(arrival.keyframe)
            elif path == MOMENTUM:
                arrival.momentum = open_plain(file, shapes)
            else:
                arrival.updates.append(Update.open(file, shapes, state.buffers))
        except FileNotFoundError as e:
            raise Unavailable(f"the version that was read is gone: {e}") from e
        except ValueError as e:
            raise Refused(f"{path} of this hub is not of this model, or damaged: {e}") from e
    return arrival


def load_global(transport) -> tuple:
    """(state, weights) of the newest global model; it only reads. Raises Refused if there is
    none."""
    def read():
        version, content = transport.read(STEP)
        if content is None:
            raise Refused("there is no global model on this hub yet")
        return fetch_global(transport, version, parse_state(content), Path(folder))
    with workspace() as folder:
        arrival = retry(read)
        return arrival.state, arrival.tensors()[0]


def workspace() -> tempfile.TemporaryDirectory:
    """A temporary folder for this process. Those that killed processes have left go now."""
    prefix = ".dumbdiloco_work_"
    for old in Path(tempfile.gettempdir()).glob(prefix + "*"):
        with contextlib.suppress(OSError, Timeout):
            if (old / "lock").exists():         # else it is being made
                with FileLock(old / "lock", timeout=0):
                    shutil.rmtree(old)
    folder = tempfile.TemporaryDirectory(prefix=prefix)
    folder.lock = FileLock(Path(folder.name) / "lock")
    folder.lock.acquire()
    return folder


class Job:
    """One piece of work in a thread of its own. It hands back a result or an error, and touches
    nothing else."""

    def __init__(self, work, *arguments):
        self.result, self.error, self.ended = None, None, False

        def run():
            try:
                self.result = work(*arguments)
            except Exception as e:      # the thread that waits for the result raises it
                self.error = e
            self.ended = True
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()


def mean_progress(steps) -> float:
    """The clock of a swarm: the mean local step of its nodes. One that is not half as far as the
    first does not count."""
    return statistics.mean(s for s in steps if 2 * s >= max(steps)) if steps else 0.0


def rounds_left(settings: dict, state: SwarmState) -> float:
    """Outer rounds until the swarm ends. Infinite if nobody knows, and with `wait`: the synchronous
    algorithm stays as published."""
    target = target_of(state.config)
    if not target or settings["wait"]:
        return math.inf
    return max(0, target - state.progress) / settings["inner_steps"]


def target_of(config: dict) -> int:
    """run.max_steps of published settings, 0 if they do not say."""
    run = config.get("run", {})
    steps = run.get("max_steps", 0) if isinstance(run, dict) else 0
    return steps if isinstance(steps, int) else 0


def active_nodes(nodes: dict, outer_step: int) -> set:
    """Nodes that are at work, as far as the ledger knows."""
    return {node for node, entry in nodes.items()
            if entry.outer_step >= max(1, outer_step + 1 - ACTIVE_ROUNDS) and not entry.final}


def members(nodes: dict, outer_step: int) -> set:
    """Nodes among which a round is averaged: those at work, and those who have finished and are
    still ahead of them."""
    active = active_nodes(nodes, outer_step)
    front = max((nodes[node].local_step for node in active), default=0)
    return active | {node for node, entry in nodes.items()
                     if entry.final and entry.local_step >= front}


def may_commit(settings: dict, transport, state: SwarmState, times, last=False) -> bool:
    """Whether a node, or the master, that has committed at these times may do so now, so that all
    together stay below commits_per_hour.

    Everybody seen in the last two hours has an equal share, and one is kept for a node that joins.
    The first half of a share is free. Then the gaps grow until it lasts; a `last` commit needs
    none.
    """
    limit = settings["commits_per_hour"]
    if not transport.limited or not limit:
        return True
    sharing = 1                 # with a bucket the master alone makes commits
    if not state.bucket:        # by the master's clock alone: a node's own may be wrong
        sharing += 1 + sum(entry.last_seen > state.published - 7200 and not entry.final
                           for entry in state.nodes.values())
    window = 3600.0 * max(1.0, sharing / limit)         # s, in which a share is one commit or more
    share, now = max(1, limit // sharing), time.time()
    times = [t for t in times if now - window < t <= now]     # not those of a clock that was ahead
    gap = 0.0 if last else window / share * 2 * (2 * len(times) / share - 1)
    return len(times) < share and (not times or now - times[-1] >= gap)


def node_table(state: SwarmState, waiting: Counter) -> list:
    """A row of text for each node, below a row of titles: what the status and the page show."""
    rows = [["node", "last seen", "at step", "merged", "lost", "waiting", "tokens", "loss",
             "stale", "refused"]]
    for node in sorted(state.nodes.keys() | waiting.keys()):
        entry = state.nodes.get(node, NodeState())
        seen = (time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.last_seen))
                if entry.last_seen else "never")
        rows.append([node, seen, entry.local_step, entry.steps, entry.lost, waiting[node],
                     entry.tokens, "-" if entry.loss is None else f"{entry.loss:.4f}",
                     max(0, state.outer_step - entry.base_outer_step), entry.refusals])
    if state.former:
        rows.append([f"{state.former['nodes']} that left", "", "", state.former["steps"],
                     state.former["lost"], "", state.former["tokens"], "", "", ""])
    return [[f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows]


def columns(rows: list) -> list:
    """The lines of a table of texts. The first column begins at the left, the others end at the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
            for first, *others in rows]


def status(transport, rows: int = 20) -> str:
    """The nodes of a swarm, and the loss in about `rows` of its outer steps, as a table. It only
    reads. Raises Refused if there is no swarm."""
    transport = Patient(transport)
    content, found = transport.read(STEP)[1], transport.list("nodes/")
    if content is None:
        raise Refused("there is no global model on this hub yet")
    state = parse_state(content)
    waiting = Counter(match[1] for path, _, _ in found if (match := DELTA.fullmatch(path)))
    ended = " | finished" if state.finished else ""
    lines = [f"run {state.run_id} | outer step {state.outer_step} | step {state.progress} "
             f"| {len(state.nodes)} nodes | {waiting.total()} deltas waiting{ended}", ""]
    lines += columns(node_table(state, waiting))
    for node, entry in sorted(state.nodes.items()):
        for refusal in entry.refused[-1:]:
            lines.append(f"last refused of {node}: step {refusal['local_step']}, "
                         f"{refusal['reason']}")
    val = {outer_step: f"{loss:.4f}" for outer_step, _, loss in state.val}
    table = [["outer step", "train loss", "val loss", "norm", "nodes"]]
    every = max(1, math.ceil(len(state.curve) / rows))
    for outer_step, _, loss, norm, nodes in state.curve[::-every][::-1]:    # with the newest one
        table.append([str(outer_step), f"{loss:.4f}", val.get(outer_step, "-"), f"{norm:.3f}",
                      nodes])
    return "\n".join([*lines, "", *columns(table)])

# ---- the master
# The ledger: which delta counts. Each step of a node is merged once, or reported lost. These
# functions write into a SwarmState; they touch no tensors and no files.


def check_delta(state: SwarmState, settings: dict, delta: Delta, there):
    """Raises ValueError for a delta that is not what its name says, or not of this run."""
    if delta.run_id != state.run_id:
        raise ValueError(f"of another run, {delta.run_id[:40]}")
    if (delta.node_id, delta.local_step) != (there.node, there.local_step):
        raise ValueError(f"its header says {delta.node_id[:64]} at step {delta.local_step}")
    if delta.base_outer_step > state.outer_step:
        raise ValueError(f"based on outer step {delta.base_outer_step}, which does not exist")
    # the fastest node that the clock counts is at most twice as far as the mean
    target = target_of(state.config)
    if target and delta.local_step > 2 * target + settings["inner_steps"]:
        raise ValueError(f"step {delta.local_step} is beyond the end of the run")


def book(state: SwarmState, delta: Delta):
    """Record a delta that is to be merged. Raises ValueError with the reason to refuse it: its
    steps are then recorded as lost, where they are known."""
    entry = state.nodes.setdefault(delta.node_id, NodeState(last_seen=time.time()))
    same = delta.lineage == entry.lineage
    if same and delta.local_step <= entry.local_step:
        raise Replay(f"a replay: step {entry.local_step} is merged already")
    if delta.incarnation < entry.incarnation:
        entry.lost += delta.steps
        raise ValueError("of a process whose node ID a newer one has taken over")
    before = entry.local_step if same else delta.first_step
    gap = delta.local_step - delta.steps - before
    entry.gaps = entry.gaps if same else []
    if gap > 0:     # what was sent in between did not come, or was bad; the node may send it again
        entry.gaps = [*entry.gaps[-19:], [before, before + gap]]
    entry.lost += max(0, delta.local_step - before)     # until this delta is found good
    earlier = entry.loss
    note_delta(entry, delta)
    if gap < 0:
        raise ValueError(f"of {delta.steps} steps, {-gap} of which are not new")
    if not delta.norm < math.inf:
        raise ValueError("it holds numbers that are not finite")
    judge_loss(state, delta, entry, earlier)
    again = min(delta.again, entry.lost - delta.steps)      # reported lost before
    entry.lost -= delta.steps + again
    entry.steps += delta.steps + again
    entry.tokens += delta.tokens


def note_delta(entry: NodeState, delta: Delta):
    """What a node's entry says of its newest delta, merged or not."""
    for name in ("lineage", "incarnation", "local_step", "base_outer_step", "loss", "seconds",
                 "final"):
        setattr(entry, name, getattr(delta, name))
    entry.pace, entry.last_seen = delta.seconds / max(1, delta.steps), time.time()


def judge_loss(state: SwarmState, delta: Delta, entry: NodeState, earlier: float | None):
    """Leave out a node whose training loss stays far above that of the others. One whose loss has
    fallen since the `earlier` one only lags behind, and stays in. Raises ValueError, with a second
    argument: the node starts again from the global model."""
    at_work = active_nodes(state.nodes, state.outer_step) - {delta.node_id}
    others = [state.nodes[node].loss for node in at_work if state.nodes[node].above == 0]
    usual = statistics.median_low([loss for loss in others if loss is not None] or [delta.loss])
    excess = delta.loss - usual
    if entry.above >= STRIKES:
        far = excess > NEAR * abs(usual)
    else:
        falls = earlier is not None and delta.loss <= earlier - NEAR * abs(earlier)
        far = excess > FAR_ABOVE * abs(usual) and not falls
    entry.above = entry.above + 1 if far else 0
    if entry.above >= STRIKES:
        raise ValueError(f"its training loss {delta.loss:.3f} stays far above the others' "
                         f"{usual:.3f}: the node starts again from the global model", True)


def note_refusal(state: SwarmState, node: str, local_step: int, reason: str, restart: bool):
    """Record a refusal, for the node to read. Those of unknown nodes are not kept."""
    entry = state.nodes.get(node)
    if entry:
        entry.refusals += 1
        refusal = Refusal(number=entry.refusals, local_step=local_step, reason=reason,
                          restart=restart)
        entry.refused = [*entry.refused[-19:], refusal]


def limit_norms(state: SwarmState, settings: dict, deltas: list, most: float):
    """Scale outsized deltas down: to max_norm_ratio medians of the NODES' norms, so that no node
    decides for all, and never above `most`, the norm of the global weights.

    A node's norm is that of its newest delta; one of a shorter loop counts as if it had grown with
    the steps up to inner_steps. Else the first whole loop after a short one would look outsized.
    """
    def of_a_loop(delta):
        return delta.norm * max(1.0, settings["inner_steps"] / max(1, delta.steps))
    latest = {node: entry.norm for node, entry in state.nodes.items() if entry.norm}
    for delta in deltas:
        latest.setdefault(delta.node_id, of_a_loop(delta))
    limit = math.inf
    if settings["max_norm_ratio"] and latest:
        usual = statistics.median_low(latest.values())
        limit = min(settings["max_norm_ratio"] * usual, most or math.inf)
    for delta in deltas:
        delta.scale = min(1.0, limit / delta.norm) if delta.norm else 1.0
        delta.norm *= delta.scale
        state.nodes[delta.node_id].norm = min(of_a_loop(delta), limit)


def forget_nodes(state: SwarmState, waiting: set):
    """Nodes that have sent nothing for long leave the state; sums of their work stay."""
    now, former = time.time(), Counter(state.former)
    for node, entry in list(state.nodes.items()):
        entry.last_seen = min(entry.last_seen, now)     # a clock may have been ahead
        if now - entry.last_seen > FORGET_AFTER and node not in waiting:
            former.update(nodes=1, steps=entry.steps, lost=entry.lost, tokens=entry.tokens)
            del state.nodes[node]
    state.former = dict(former)


def note_round(state: SwarmState, deltas: list, line: dict):
    """Write a round into the state, its curve and the line of the history."""
    nodes = sorted({delta.node_id for delta in deltas})
    for node in nodes:
        state.nodes[node].outer_step = state.outer_step
    there = members(state.nodes, state.outer_step)
    mean = mean_progress([state.nodes[node].local_step for node in there])
    state.progress = max(state.progress, int(mean))
    line["outer_step"] = state.outer_step
    line["merged"] = [
        {"node": d.node_id, "local_step": d.local_step, "base_outer_step": d.base_outer_step,
         "steps": d.steps + d.again, "tokens": d.tokens, "loss": d.loss,
         "norm": d.norm} for d in deltas]
    loss = statistics.mean(delta.loss for delta in deltas)
    state.curve.append([state.outer_step, state.progress, loss, line["norm"], ",".join(nodes)[:40]])
    if len(state.curve) > 400:              # half as fine: the state stays small
        state.curve = state.curve[:-1:2] + state.curve[-1:]


def has_finished(state: SwarmState, settings: dict) -> bool:
    """Whether the run is over: by its outer steps, by the mean progress of the nodes, or because
    every node has ended."""
    if 0 < settings["max_outer_steps"] <= state.outer_step:
        return True
    target, there = target_of(state.config), members(state.nodes, state.outer_step)
    ended = bool(there) and not active_nodes(state.nodes, state.outer_step)
    mean = mean_progress([state.nodes[node].local_step for node in there])
    return target > 0 and (mean >= target or ended)


# What a master says of a swarm.


def advice(settings: dict, rounds: list):
    """Yields (topic, text) for what is known to hurt, and the setting that helps. `rounds`: the
    newest lines of the history."""
    inner_steps, merged = settings["inner_steps"], [line["merged"] for line in rounds]
    if inner_steps <= 10 and settings["outer_momentum"] >= 0.9:
        yield "short", (f"an outer momentum of {settings['outer_momentum']} over inner loops of "
                        f"{inner_steps} steps overshoots: raise --inner-steps, or lower "
                        f"--outer-momentum to 0.6")
    if len(rounds) < 5:     # the first loops are short
        return
    age = statistics.median(line["outer_step"] - 1 - m["base_outer_step"]
                            for line in rounds for m in line["merged"])
    if age >= 3:
        yield "stale", ("deltas come three and more rounds late: raise --inner-steps, so that an "
                        "inner loop is longer than an upload and a download")
    loops = statistics.median(statistics.median(m["steps"] for m in entries)
                              for entries in merged) / inner_steps
    if loops >= 4:
        yield "long", (f"a round takes {loops:.0f} inner loops: raise --inner-steps to "
                       f"{inner_steps * loops:.0f}")
    tokens = Counter()
    for m in sum(merged, []):
        tokens[m["node"]] += m["tokens"]
    node, most = tokens.most_common(1)[0]
    if len(tokens) > 2 and most > tokens.total() / 2:
        yield "large", (f"node {node} trains more than half of the tokens of the last rounds, and "
                        f"counts as one of {len(tokens)}: a larger --target-batch-size there makes "
                        f"its deltas better")


def changes(old: dict, new: dict):
    """Yields (section, key, before, now) of the settings that differ."""
    for section, values in new.items():
        for key, value in values.items():
            before = old.get(section, {}).get(key, value)
            if before != value:
                yield section, key, before, value


BEGIN = "<!-- swarm: from here to the closing mark the master writes; the rest is yours -->"
END = "<!-- swarm: end -->"


def page_card(settings: dict, exported: bool) -> str:
    """The page's first version, which the owner may change: metadata of the Hub, and a title."""
    lines = ["---", "pipeline_tag: text-generation"]
    if settings["license"]:
        lines.append(f"license: {settings['license']}")
    if exported:
        lines.append("library_name: transformers")
    name = settings["hub"].rstrip("/").split("/")[-1]
    return "\n".join([*lines, "tags:", "- text-generation", "- dumbdiloco",
                      "- distributed-training", "---", f"# {name}"])


def page_part(state: SwarmState, hub: str, parameters: int, picture: bool) -> str:
    """The part of the page that the master writes."""
    of = {section: state.config.get(section, {}) for section in ("model", "data")}
    tokens = state.former.get("tokens", 0) + sum(e.tokens for e in state.nodes.values())
    val = f", validation loss {state.val[-1][2]:.4f}" if state.val else ""
    titles, *rows = node_table(state, Counter())
    lines = [
        BEGIN, f"A model of {parameters:,} parameters (`{of['model'].get('name')}`), "
        f"trained on `{of['data'].get('path')}` by a swarm of {len(state.nodes)} node(s) that "
        f"share what they learn through this repository.", "",
        f"**Outer step {state.outer_step:,}, step {state.progress:,} of "
        f"{target_of(state.config):,}**, {tokens:,} tokens{val}.", ""]
    if picture:
        lines += [f"![loss against steps]({CURVE})", ""]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", "To join, with a token in HF_TOKEN that may write here:", "",
                      "```", f"python worker.py --hub={hub} --node-id=NAME", "```", END])


def replace_part(page: str, part: str) -> str:
    """The page with a new part between the marks; without them it goes to the end."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        before, after = page.replace(BEGIN, "").rstrip() + "\n\n", "\n"
    return before + part + after


class Waiting(NamedTuple):
    """A file below nodes/ that has the name of a delta. They sort by node and step."""
    node: str
    local_step: int
    path: str
    size: int
    tag: str
    since: float                # when it was seen first


class Repository:
    """What a master holds of its repository: the head, and the state that it has published there.
    Once another master has published, everything here raises Superseded."""

    def __init__(self, transport):
        self.transport = transport
        self.version, self.content = transport.read(STEP)   # the bytes of the state, or None
        self.own = []                   # hashes of the states published here
        self.listing = None, []         # a version, and what was below nodes/ then
        self.since = {}                 # {path: when it was seen first}

    def commit(self, content: bytes, add: dict, delete, message: str):
        """Publish a state and files, on the head. Raises Unavailable or Conflict if the commit was
        not made."""
        try:
            self.version = self.transport.commit({**add, STEP: content}, sorted(delete),
                                                 self.version, message)
        except (Conflict, Unavailable):     # it may have been made
            self.version, there = self.transport.read(STEP)
            if there != content:
                self.must_be_ours(there)
                raise
        self.content = content
        self.own = [*self.own[-7:], hashlib.sha256(content).hexdigest()]

    def must_be_ours(self, there):
        """Raises Superseded if another master has published `there`, Unavailable if it is old."""
        if there == self.content or there is None:
            return
        if hashlib.sha256(there).hexdigest() in self.own[:-1]:          # a cache may lag behind
            raise Unavailable("the repository answers with an older version")
        try:
            parse_state(there)
        except Refused:
            return              # damaged: ours replaces it
        raise Superseded("another master has taken the repository over; this one stops")

    def waiting(self) -> tuple:
        """The deltas there, sorted, and at most a hundred paths that are no delta's name. An idle
        look is one HEAD."""
        version, tag = self.transport.head()
        if not matches_hash(self.content, tag):
            self.repair(version)
        # a delta that comes to a bucket makes no version
        if version != self.listing[0] or getattr(self.transport, "bucket", ""):
            self.listing = version, self.transport.list("nodes/", version)
            self.version = version
        waiting, strange, now = [], [], time.monotonic()
        self.since = {path: self.since.get(path, now) for path, _, _ in self.listing[1]}
        for path, size, tag in self.listing[1]:
            match = DELTA.fullmatch(path)
            if match and NODE_ID.fullmatch(match[1]):
                waiting.append(Waiting(match[1], int(match[2]), path, size, tag, self.since[path]))
            else:
                strange.append(path)
        return sorted(waiting), strange[:100]

    def repair(self, version):
        """Publish the state again if it is gone or damaged."""
        there = self.transport.read(STEP, version)[1]
        self.must_be_ours(there)
        if there != self.content:
            self.transport.commit({STEP: self.content}, (), version, "the state again")
            raise Unavailable(f"{STEP} was {'damaged' if there else 'gone'}: published again")

    def there(self, prefix: str) -> dict:
        """{path: (size, tag)}"""
        found = self.transport.list(prefix, self.version)
        return {path: (size, tag) for path, size, tag in found}

    def damaged(self, files: dict) -> str:
        """The first of these files that is not there as it was published, or ""."""
        there = self.there("global/")
        for path, file in files.items():
            size, tag = there.get(path, (-1, ""))
            if size != file["size"] or len(tag) == 64 and tag != file["sha256"]:
                return path
        return ""


class MasterOuterLoop:
    """Merges what the nodes send, and publishes. All its state is in the repository: start it
    anywhere, with an empty disk, and it goes on bit for bit.

    settings: the section `distributed` of the config; what is not given has its default. weights,
    and `published` (what a worker shall know: "config", "buffers"), begin a repository that holds
    no model yet; of one that does, `published` is brought up to date. evaluate(weights, step) ->
    None, or a function that returns the validation loss and is run in the background: it must not
    read the weights, which move on. files: {name: bytes} that make the repository a model of
    transformers. draw(curves) -> the picture of the page, of {"train": [(step, loss)], "val": the
    same}; without it there is no page. Raises Refused when another master takes over. Memory: 8
    bytes a parameter, and 2 more while it publishes.
    """

    def __init__(self, transport, settings: dict, weights: dict, published=None, evaluate=None,
                 files=None, draw=None, log=write_line):
        return_freed_memory()
        self.transport = Patient(transport, self.tell, self.stopped)
        self.settings, self.log = complete(settings), log
        self.evaluate, self.files, self.draw = evaluate, files or {}, draw
        self.shapes = shapes_of(weights)
        self.parameters = sum(math.prod(shape) for shape in self.shapes.values())
        self.work = workspace()
        self.folder = Path(self.work.name)
        self.stop = False
        self.evaluation = None          # under way: (outer step, step, Job)
        self.first_seen = None          # when the first delta of the coming round was seen
        self.page_made = -math.inf      # when the page was published
        self.recent, self.told = deque(maxlen=5), set()     # rounds; topics of advice given
        for pause in (1.0, 2.0, 4.0, 8.0, None):
            try:
                return self.take_over(weights, published or {})
            # a commit came between, of a master that has died, or that will stop when it sees ours;
            # or a file is damaged
            except (Superseded, Unavailable) as e:
                if pause is None:
                    raise Refused(f"{e.args[0]}; a file that is gone or damaged can be put back "
                                  f"from the repository's history or from a machine that trains")
                self.tell(e.args[0], pause)
                wait(pause, self.stopped)

    def stopped(self) -> bool:
        return self.stop

    def tell(self, error: str, retry_in: float):
        self.log(f"hub_error {error}; next try in {retry_in:.0f} s")

    def patiently(self, work):
        return retry(work, self.tell, self.stopped)

    def waiting(self) -> tuple:
        return self.patiently(self.repository.waiting)

    # the start

    def take_over(self, weights: dict, published: dict):
        """Load what is published, or begin, and commit: from then on the commit of any other master
        fails. Raises Superseded, or Unavailable if the model does not arrive whole."""
        self.repository = Repository(self.transport)
        published = json.loads(json.dumps(published))       # JSON has lists only
        if self.repository.content is None:
            state, files = self.begin(weights, published)
        else:
            state, files = self.go_on(published)
        state.master = os.urandom(4).hex()
        state.bucket = getattr(self.transport, "bucket", "") or ""
        self.publish(state, {**self.files, **files})
        self.log(f"master   at outer step {state.outer_step} of run {state.run_id}: "
                 f"{'the swarm has finished' if state.finished else 'waiting for deltas'}")

    def begin(self, weights: dict, published: dict) -> tuple:
        """(state, files) of a new run. Raises Refused where there is a model without a readable
        state: it is precious."""
        if found := list(self.repository.there("global/")):
            raise Refused(f"the hub holds {found[0]} but no {STEP}, and a new run would overwrite "
                          f"it: {RECOVER}, or use another --hub")
        self.state, self.history = SwarmState(os.urandom(8).hex(), **published), b""
        self.weights = {k: v.detach().to("cpu", torch.float32, copy=True).contiguous()
                        for k, v in weights.items()}
        self.momentum = {k: torch.zeros_like(v) for k, v in self.weights.items()}
        return self.state, self.write_keyframe(self.state, exact=False)

    def go_on(self, published: dict) -> tuple:
        """(state, files) of the run that is there, with the settings given now."""
        self.state, at = parse_state(self.repository.content), self.repository.version
        # keep: not patiently. The version may be gone, or damaged for good
        self.load(fetch_global(self.transport.transport, at, self.state, self.folder))
        self.announce(self.state.config, published.get("config", self.state.config))
        state = dataclasses.replace(copy.deepcopy(self.state), **published)
        target, before = target_of(state.config), target_of(self.state.config)
        state.finished = 0 < target <= min(before, state.progress)
        if target > before:         # those who have ended may go on
            for entry in state.nodes.values():
                entry.final = False
        keyframe = self.folder / WEIGHTS.replace("/", "_")
        return state, {MODEL: keyframe} if "config.json" in self.files else {}

    def load(self, arrival: Arrival):
        """Weights, momentum and history of what is published."""
        if shapes_of(arrival.keyframe) != self.shapes:
            raise Refused("the model on this hub is another one: leave the flags of the model "
                          "out, or use another --hub")
        self.weights, self.momentum = arrival.tensors()
        segment = HISTORY.format(arrival.state.keyframe)
        self.history = self.transport.read(segment, arrival.version)[1] or b""

    def announce(self, old: dict, new: dict):
        """Log the settings of the run that have changed. Raises Refused for those of the model."""
        for section, key, before, now in changes(old, new):
            if section == "model":
                raise Refused(f"model.{key}={now}: the model of this hub has {before}; leave the "
                              f"flag out, or use another --hub")
            self.log(f"setting  {section}.{key} is {now} now, was {before}: the workers take it "
                     f"over")

    # the outer round

    def sync_once(self) -> int:
        """One outer round over the deltas that are there now. Returns the outer step; without
        deltas nothing happens. Raises Superseded if another master has published since."""
        began = time.monotonic()
        waiting, strange = self.waiting()
        if not waiting and not strange:
            return self.state.outer_step
        state = copy.deepcopy(self.state)       # published at the end
        line = {"event": "round", "outer_step": state.outer_step, "merged": [], "refused": [],
                "strange": len(strange)}
        deltas, delete = self.collect(state, waiting, line)
        broken = self.repository.damaged(self.state.files)
        files = self.outer_step(state, deltas, line) if deltas else {}
        if broken and state.keyframe != state.outer_step:
            self.log(f"notice   {broken} was damaged or gone: a keyframe is published")
            files |= self.write_keyframe(state, exact=True)
        state.strange += len(strange)
        if not state.bucket:
            state.committed += sum(delta.size for delta in waiting)
        forget_nodes(state, {delta.node for delta in waiting})
        self.take_value(state, line)
        line |= {"bytes_in": sum(delta.bytes for delta in deltas),
                 "bytes_out": sum(f.stat().st_size for f in set(files.values())),
                 "seconds": time.monotonic() - began, "time": time.time()}
        self.publish(state, files, line, [*delete, *strange])
        self.first_seen = None
        self.report(line, deltas)
        if deltas:
            self.begin_evaluation(state.progress)
        if 0 < self.settings["squash_gb"] * 1e9 <= state.committed:
            self.squash(f"{state.committed / 1e9:.1f} GB were committed since the last time")
        return state.outer_step

    def collect(self, state: SwarmState, waiting: list, line: dict) -> tuple:
        """(deltas to merge, paths to delete). In a fixed order, nodes by name and each by step: the
        order of arrival cannot change a bit."""
        deltas, delete, last = [], [], max(there.since for there in waiting)
        with ThreadPoolExecutor(8) as pool:     # over the Hub each is requests, which take seconds
            jobs = [pool.submit(self.fetch_delta, there) for there in waiting]
        for there, job in zip(waiting, jobs):
            try:
                delta = job.result()
                check_delta(state, self.settings, delta, there)
                delta.norm = norm_of(delta.stored, self.shapes)
                book(state, delta)
                state.nodes[there.node].waited = last - there.since
                deltas.append(delta)
            except FileNotFoundError:       # gone since it was listed
                continue
            except ValueError as e:
                reason = "".join(c if c.isprintable() else "?" for c in str(e.args[0])[:200])
                line["refused"].append({"path": there.path, "reason": reason})
                if not isinstance(e, Replay):       # else it is merged: nothing to tell the node
                    note_refusal(state, there.node, there.local_step, reason, len(e.args) > 1)
            delete.append(there.path)
        limit_norms(state, self.settings, deltas, self.weights_norm())
        return deltas, delete

    def fetch_delta(self, there: Waiting) -> Delta:
        """Raises ValueError for a file that is no delta of this model."""
        if there.size > 4 * self.parameters + (1 << 20) + 400 * len(self.shapes):
            raise ValueError(f"{there.size:,} bytes, more than this model can need")
        file = self.folder / there.path.replace("/", "_")
        self.transport.fetch(there.path, self.repository.version, file, there.tag)
        try:
            return Delta.open(file, self.shapes)
        finally:
            file.unlink()           # it stays mapped

    def weights_norm(self) -> float:
        return math.sqrt(sum(torch.linalg.vector_norm(self.weights[name][rows]).item() ** 2
                             for name, rows in pieces(self.shapes)))

    def outer_step(self, state: SwarmState, deltas: list, line: dict) -> dict:
        """Merge the deltas: one Nesterov step, piece by piece, coded as an update, and folded into
        weights and momentum as every reader does it. {path: file} to publish."""
        contributors = {delta.node_id for delta in deltas}
        # those who have finished count: else a slow node's last steps, without the others' to
        # average out their noise, would move the model as far as all together did
        num_nodes = len(contributors | members(state.nodes, state.outer_step + 1))
        update = self.new_update(state, len(contributors) / num_nodes)
        state.outer_step += 1
        state.part = (state.part + update.f) / 2
        for name, rows in pieces(self.shapes):
            weight, buf = self.weights[name][rows], self.momentum[name][rows]
            g = torch.zeros_like(weight)
            for delta in deltas:
                g.add_(delta.piece(name, rows).mul_(delta.scale))
            if name in state.buffers:
                u = g / len(contributors)
            else:
                u = nesterov(g / num_nodes, buf, update)
            encode_piece(update.stored, name, rows, u, self.shapes[name])
            fold(update, name, rows, weight, buf)
        path, file = UPDATE.format(state.outer_step), self.folder / "update"
        header = {k: str(getattr(update, k)) for k in ("f", "mu", "decay", "outer_lr", "keyframe",
                                                       "codec")}
        state.files[path] = self.write(file, update.stored, header)
        line["norm"] = norm_of(update.stored, self.shapes)
        update.stored = None                    # its memory, before that of a keyframe
        note_round(state, deltas, line)
        if state.outer_step % self.settings["keyframe_every"] == 0:
            return {path: file, **self.write_keyframe(state, exact=False)}
        return {path: file}

    def new_update(self, state: SwarmState, f: float) -> Update:
        """The update of the coming round, to which a part f of the nodes has contributed."""
        mu = outer_momentum(self.settings, state.outer_step, rounds_left(self.settings, state))
        codec = self.settings["codec"]
        keyframe = (state.outer_step + 1) % self.settings["keyframe_every"] == 0
        rounded = keyframe and codec != "fp32"
        codec = "int8" if codec in ("int4", "int2") else codec  # finer: no residual has to be kept
        return Update(f, mu, mu ** f, float(self.settings["outer_lr"]), rounded, codec,
                      state.buffers, self.shapes, empty_stored(self.shapes, codec))

    # publication

    def write(self, file: Path, tensors: dict, header: dict) -> dict:
        """Write a file of the global model. Returns its entry in the state."""
        def attempt():
            file.unlink(missing_ok=True)        # tensors may be mapped from the old one
            return save(tensors, file, header)
        return self.patiently(attempt)

    def write_keyframe(self, state: SwarmState, exact: bool) -> dict:
        """{path: file} of the whole model as it is now, recorded in `state`. The momentum is bf16,
        as the last update has rounded it; exact: fp32, where none has."""
        momentum = self.momentum
        if self.settings["codec"] != "fp32" and not exact:
            momentum = {k: v.bfloat16() for k, v in momentum.items()}
        # who follows may be a few rounds behind: the updates before this keyframe stay until the
        # next one
        kept = updates_after(state.keyframe, state)
        state.files = {path: state.files[path] for path in kept if path in state.files}
        state.keyframe, files = state.outer_step, {}
        for path, tensors in ((WEIGHTS, self.weights), (MOMENTUM, momentum)):
            files[path] = self.folder / path.replace("/", "_")
            state.files[path] = self.write(files[path], tensors, {"format": "pt"})
        if "config.json" in self.files:
            files[MODEL] = files[WEIGHTS]       # one file under two names: one upload
        return files

    def publish(self, state: SwarmState, files: dict, line: dict | None = None, delete=()):
        """Put `state` out in one commit, with the line of the history. Raises Superseded if the
        state there is not the one this was made from."""
        segment = self.history if state.keyframe == self.state.keyframe else b""
        if line:
            segment += json.dumps(line).encode() + b"\n"
            files = {**files, HISTORY.format(state.keyframe): segment}
        state.momentum = outer_momentum(self.settings, state.outer_step,
                                        rounds_left(self.settings, state))
        state.outer_lr = float(self.settings["outer_lr"])
        state.finished = state.finished or has_finished(state, self.settings)
        state.published = time.time()
        state.commits = [t for t in state.commits if t > state.published - 7200][-200:]
        state.commits.append(state.published)
        state.committed += sum(v["size"] for path, v in state.files.items()
                               if path in files and not (state.bucket and IN_BUCKET.match(path)))
        content, delete = state.content(), {*delete, *self.state.files.keys() - state.files}

        def made() -> bool:
            try:
                self.repository.commit(content, files, delete, f"outer step {state.outer_step}")
                return True
            except StorageFull:
                if self.state.committed:        # else it was squashed: the space is free in hours
                    self.squash("its storage is full")
                raise
            except Conflict:    # only deltas have come, or somebody has deleted one
                delete.intersection_update(self.repository.there(""))
                return False
        while not self.patiently(made):
            wait(0.2, self.stopped)
        self.state, self.history = state, segment

    def squash(self, why: str):
        """Forget the repository's history: what was overwritten stops counting."""
        self.state.committed = 0        # published with the next round
        try:
            self.transport.squash()
            self.log(f"squash   the history of the repository was squashed: {why}")
        except (Conflict, Unavailable, Refused, FileNotFoundError) as e:    # the next one may
            self.log(f"notice   the history could not be squashed: {e.args[0]}")

    def publish_page(self):
        """README.md and its picture. Best effort, in a commit of its own: no round waits for it."""
        self.page_made = time.monotonic()
        try:
            version, old = self.transport.read(PAGE)
            old = (old or b"").decode(errors="replace")
            files = self.picture()
            part = page_part(self.state, self.settings["hub"], self.parameters, bool(files))
            if not old.strip():
                old = page_card(self.settings, "config.json" in self.files)
            files[PAGE] = replace_part(old, part).encode(errors="replace")
            # expect: what the owner writes meanwhile is not overwritten
            self.transport.commit(files, (), version, "page")
            self.state.commits.append(time.time())      # it counts for the limit
        except (Conflict, Unavailable, Refused, FileNotFoundError) as e:
            self.log(f"notice   {PAGE} stays as it is: {' '.join(map(str, e.args[:1]))}")

    def picture(self) -> dict:
        curves = {"train": [(step, loss) for _, step, loss, *_ in self.state.curve],
                  "val": [(step, loss) for _, step, loss in self.state.val]}
        try:
            picture = self.draw(curves)
            return {CURVE: picture if isinstance(picture, bytes) else picture.encode()}
        except Exception as e:      # numbers from nodes, a missing package: no page fails for it
            self.log(f"notice   no picture on the page: {type(e).__name__} {e}")
            return {}

    # the time of a round

    def active(self) -> set:
        """Nodes that a round waits for."""
        return active_nodes(self.state.nodes, self.state.outer_step)

    def loops(self) -> list:
        """Seconds of an inner loop of each active node."""
        return [self.state.nodes[node].seconds for node in self.active()]

    def round_timeout(self) -> float:
        """Seconds that a round waits after its first delta: two inner loops of the lower median, so
        that one slow node does not hold up all. The first round waits 1 s, for nodes that began at
        the same time."""
        if not self.active():
            return 1.0
        return self.settings["round_timeout"] or 2 * statistics.median_low(self.loops())

    def due(self, nodes: set) -> bool:
        """Whether the round closes now: the deltas of all are there, or it has waited long
        enough."""
        if not nodes:
            self.first_seen = None
            return False
        if self.first_seen is None:
            self.first_seen = time.monotonic()
        return (set() < self.active() <= nodes
                or time.monotonic() - self.first_seen > self.round_timeout())

    # evaluation, in the background

    def begin_evaluation(self, step: int):
        """Start an evaluation if one is due and none is under way. No round waits for it."""
        if self.evaluate and self.evaluation is None:
            work = self.evaluate(self.weights, step)
            if work:
                self.evaluation = (self.state.outer_step, self.state.progress, Job(work))

    def take_value(self, state: SwarmState, line: dict, patient=False):
        """Put the result of an evaluation that has ended into the state and the history. patient:
        wait for one that is under way."""
        if self.evaluation is None:
            return
        outer_step, step, job = self.evaluation
        while patient and not job.ended and not self.stop:
            wait(0.1, self.stopped)
        if not job.ended:
            return
        self.evaluation = None
        if job.error:
            self.log(f"notice   no validation loss: {type(job.error).__name__} {job.error}")
        elif job.result is not None and math.isfinite(job.result):
            state.val.append([outer_step, step, job.result])
            state.val = state.val if len(state.val) <= 400 else state.val[::2]
            line |= {"val_loss": job.result, "val_outer_step": outer_step}

    # what it says

    def report(self, line: dict, deltas: list):
        for r in line["refused"][:20]:
            self.log(f"refused  {r['path']}: {r['reason']}")
        if line["strange"]:
            self.log(f"refused  {line['strange']} files below nodes/ that are no deltas: deleted")
        if not deltas:
            return
        nodes = sorted({delta.node_id for delta in deltas})
        val = (f" | val {line['val_loss']:.4f} @ {line['val_outer_step']}"
               if "val_loss" in line else "")
        self.log(f"round    {line['outer_step']:4d} | nodes {len(nodes)}/"
                 f"{len(self.active().union(nodes))} "
                 f"{','.join(nodes)[:40]} | norm {line['norm']:.3f}{val} | "
                 f"{line['bytes_in'] / 1e6:.1f} MB in | "
                 f"{line['bytes_out'] / 1e6:.1f} MB out | {line['seconds']:.1f} s")
        self.recent.append(line)
        notices = [(f"norm {d.node_id}", f"node {d.node_id} sends deltas far above the others' "
                    f"norm: they are scaled down; is its learning rate right?")
                   for d in deltas if d.scale < 1]
        for topic, text in [*notices, *advice(self.settings, list(self.recent))]:
            if topic not in self.told:
                self.told.add(topic)
                self.log(f"notice   {text}")

    # the loop

    def run(self):
        """Round after round, until `stop` is set or the swarm has finished. An idle poll is one
        HEAD."""
        try:
            while not self.stop:
                waiting, strange = self.waiting()
                if self.over(waiting):
                    return self.end()
                if not waiting:
                    self.end_without_the_silent()
                due = self.due({delta.node for delta in waiting})
                if may_commit(self.settings, self.transport, self.state, self.state.commits):
                    if due or strange and not waiting:
                        self.sync_once()
                    elif self.draw and time.monotonic() - self.page_made >= PAGE_EVERY:
                        self.publish_page()
                wait(poll_interval(self.settings, self.transport, *self.loops()), self.stopped)
            self.log(f"stop     at outer step {self.state.outer_step}: what is merged is on the "
                     f"hub; start it again anywhere")
        except Unavailable as e:        # only once `stop` is set
            self.log(f"stop     the hub cannot be reached ({e.args[0]}): outer step "
                     f"{self.state.outer_step} may not be there; start it again to see")

    def over(self, waiting: list) -> bool:
        """Whether the swarm has finished, and no more deltas are to come."""
        if not self.state.finished:
            return False
        if 0 < self.settings["max_outer_steps"] <= self.state.outer_step:
            return True
        grace = max(60.0, 2 * self.round_timeout()) if self.active() else 0.0
        return not waiting and time.time() - self.state.published >= grace

    def end_without_the_silent(self):
        """Publish the end of a swarm of which some nodes have ended their run, and the others have
        been silent for many times a round."""
        patience = max(120.0, 5 * self.round_timeout())
        if (self.state.finished or not any(entry.final for entry in self.state.nodes.values())
                or time.time() - self.state.published < patience):
            return
        self.log(f"notice   nothing has come from {', '.join(sorted(self.active()))[:60]} for "
                 f"{patience:.0f} s, and the others have ended: the swarm ends without")
        self.publish(dataclasses.replace(copy.deepcopy(self.state), finished=True), {})

    def end(self):
        """Publish the last keyframe with its validation loss, and say where the model is."""
        state = copy.deepcopy(self.state)
        line = {"event": "end", "outer_step": state.outer_step, "time": time.time()}
        self.take_value(state, line, patient=True)
        if not (state.val and state.val[-1][0] == state.outer_step):
            self.begin_evaluation(max(state.progress, target_of(state.config)))
            self.take_value(state, line, patient=True)
        files = {}
        if state.keyframe != state.outer_step:
            files = self.write_keyframe(state, exact=True)
        if files or "val_loss" in line:
            self.publish(state, files, line)
        if self.draw:
            self.publish_page()
        if count := len(self.waiting()[0]):
            self.log(f"notice   {count} deltas came after the last outer step and wait on the hub: "
                     f"a master with a larger --max-outer-steps merges them")
        val = f", validation loss {state.val[-1][2]:.4f}" if state.val else ""
        self.log(f"finished the swarm is at outer step {state.outer_step}, step {state.progress}"
                 f"{val}")
        hub = self.settings["hub"]
        if "config.json" in self.files:
            self.log(f"finished the model: python master.py --hub={hub} --export=DIR")
            self.log("finished a sample: python -c \"from transformers import pipeline; "
                     "print(pipeline('text-generation', 'DIR')('def '))\"")
        else:
            self.log(f"finished the model: diloco.load_global(diloco.open_hub({hub!r}))[1]")

# ---- the worker


class TrainerProtocol(Protocol):
    """What DumbDiLoCo asks of a trainer. PlainTrainer is the smallest one."""
    model: Any                  # a torch module; its weights are changed in place
    step: int                   # optimizer steps so far; a joining node begins at the swarm's
    position: int               # samples read so far
    tokens: int                 # labels trained on so far
    last_loss: Any              # of the newest step: a number, or a tensor of one
    config: dict                # {"run": {"max_steps"}, "data": {"target_batch_size"}}; the swarm
    #                             moves max_steps to where this node's part ends
    stop_signal: Any            # None, or why to stop; set here when the swarm cannot go on

    def emit(self, event: str, line: str, **payload): ...       # one event, for readers and a file
    def progress(self) -> str: ...                              # "120/2000"


class PlainTrainer:
    """The smallest trainer, for a training loop of your own: count `step` and `tokens`, keep
    `last_loss`, and call after_step() of the node."""

    def __init__(self, model, max_steps: int, batch_size: int = 1):
        self.model, self.step, self.position, self.tokens = model, 0, 0, 0
        self.last_loss, self.stop_signal = 0.0, None
        self.config = {"run": {"max_steps": max_steps}, "data": {"target_batch_size": batch_size}}

    def running(self) -> bool:
        return self.step < self.config["run"]["max_steps"] and not self.stop_signal

    def count(self, loss, tokens: int = 0):
        """After each optimizer step."""
        self.step, self.tokens, self.last_loss = self.step + 1, self.tokens + tokens, loss.detach()

    def emit(self, event: str, line: str, **payload):
        write_line(f"{event:<8} {line}")

    def progress(self) -> str:
        return f"{self.step}/{self.config['run']['max_steps']}"


def check_trainer(trainer):
    """Raises ValueError naming what the trainer lacks."""
    wanted = [*TrainerProtocol.__annotations__, "emit", "progress"]
    missing = [name for name in wanted if not hasattr(trainer, name)]
    if missing:
        raise ValueError(f"DumbDiLoCo: the trainer has no {', '.join(missing)}; "
                         f"diloco.TrainerProtocol says what each is")
    for section, key in (("run", "max_steps"), ("data", "target_batch_size")):
        if key not in trainer.config.get(section, {}):
            raise ValueError(f"DumbDiLoCo: trainer.config has no {section}.{key}")


def swarm_tensors(model) -> dict:
    """What the nodes share: parameters once each, and floating buffers that belong to the state."""
    state = model.state_dict()
    named = dict(model.named_parameters())
    seen = {p.data_ptr() for p in named.values()}
    return named | {k: v for k, v in state.items()
                    if k not in named and v.is_floating_point() and v.data_ptr() not in seen}


@torch.no_grad()
def set_tensors(tensors: dict, values: dict):
    """Write values into the tensors of a model, in place."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


class LocalModel:
    """Where a worker stands, in tensors of the model's shapes.

        baseline = G - in flight - ahead * momentum
        weights  = baseline - remainder

    G and momentum are the global model installed last. In flight are the deltas that G does not
    contain yet. The remainder is what was learned since, and what the codec has rounded away: it
    goes out with the next delta. `ahead` is 0, or outer_lr * mu**2 while deltas are in flight: the
    weights then stand where the momentum will carry G, the point at which Nesterov's method takes
    the gradient. Memory: 8 bytes a parameter; the deltas are mapped files.
    """

    def __init__(self, model):
        self.tensors = swarm_tensors(model)
        self.shapes = shapes_of(self.tensors)
        self.G, self.momentum, self.in_flight, self.ahead = {}, {}, [], 0.0

    def expected(self, name: str, rows, in_flight: list, ahead: float):
        """G - in flight - ahead * momentum"""
        value = self.G[name][rows].clone()
        for delta in in_flight:
            value.sub_(delta.piece(name, rows))
        return value.sub_(self.momentum[name][rows] * ahead) if ahead else value

    def baseline(self, name: str, rows):
        """What the swarm will know of this node once its deltas in flight are merged."""
        return self.expected(name, rows, self.in_flight, self.ahead)

    def remainder(self, name: str, rows):
        weight = self.tensors[name].detach()[rows].to("cpu", torch.float32)
        return self.baseline(name, rows) - weight

    def remainders(self) -> dict:
        """The whole remainder: 4 more bytes a parameter, for a checkpoint."""
        whole = {k: torch.empty(shape) for k, shape in self.shapes.items()}
        for name, rows in pieces(self.shapes):
            whole[name][rows] = self.remainder(name, rows)
        return whole

    @torch.no_grad()
    def place(self, arrival: Arrival, remainders: dict | None):
        """Stand at a global model, with these remainders or none."""
        self.G, self.momentum = arrival.tensors()
        for name, rows in pieces(self.shapes):
            value = self.baseline(name, rows)
            if remainders:
                value.sub_(remainders[name][rows])
            self.tensors[name][rows].copy_(value)

    @torch.no_grad()
    def encode(self, codec: str) -> dict | None:
        """The remainder, coded: the next delta. None if it is not finite."""
        # Not in the background: that would need a snapshot of 4 bytes a parameter. It costs less
        # than a thousandth of an inner loop.
        stored = empty_stored(self.shapes, codec)
        for name, rows in pieces(self.shapes):
            value = self.remainder(name, rows)
            if not value.isfinite().all():
                return None
            encode_piece(stored, name, rows, value, self.shapes[name])
        return stored

    @torch.no_grad()
    def look_ahead(self, ahead: float):
        """Move the weights to where the momentum carries G; 0 takes them back."""
        for name, rows in pieces(self.shapes):
            step = self.momentum[name][rows] * (ahead - self.ahead)
            weight = self.tensors[name][rows]
            weight.sub_(step.to(weight.device, weight.dtype))
        self.ahead = ahead

    @torch.no_grad()
    def install(self, arrival: Arrival, fates: dict, stay: float, ahead: float, forget: bool):
        """Move to a newer global model without losing local work. fates: {local step: what has
        become of the delta in flight}

            merged    contained in the new model            -> forgotten
            missed    skipped when a later one was merged   -> back into the remainder
            refused   rejected by the master                -> dropped
            pending   not processed yet                     -> stays in flight

        stay: the share of the prediction error that the weights do not follow. forget: the node
        starts again from the new model, without its local work.
        """
        by_fate = {fate: [] for fate in ("merged", "missed", "refused", "pending")}
        for delta in self.in_flight:
            by_fate[fates[delta.local_step]].append(delta)
        missed, pending = by_fate["missed"], [] if forget else by_fate["pending"]
        ahead = ahead if pending else 0.0
        for name, rows in pieces(self.shapes):
            before, remainder = self.baseline(name, rows), self.remainder(name, rows)
            for delta in missed:
                remainder.add_(delta.piece(name, rows))
            for delta in missed + by_fate["refused"]:   # no global model will ever contain it
                before.add_(delta.piece(name, rows))
            arrival.advance(name, rows, self.G[name][rows], self.momentum[name][rows])
            if stay:
                error = self.expected(name, rows, pending, 0.0) - before
                remainder.add_(error.mul_(stay))
            weight = self.expected(name, rows, pending, ahead)
            self.tensors[name][rows].copy_(weight if forget else weight.sub_(remainder))
        self.in_flight, self.ahead = pending, ahead


@dataclass
class Identity:
    """Who a worker process is. A lineage is what goes on with one run folder, process after
    process; each process is a new incarnation, and the newest one counts."""
    node_id: str
    lineage: str
    incarnation: str

    @classmethod
    def new(cls, node_id: str, lineage: str = "", after: str = ""):
        """A new process; its incarnation compares greater than `after`, whatever the clock says."""
        number = max(time.time_ns(), int(re.match(r"\d{,30}", after)[0] or 0) + 1)
        incarnation = f"{number:020d}-{os.urandom(4).hex()}"
        return cls(node_id, lineage or incarnation, incarnation)

    def entry(self, state: SwarmState) -> NodeState:
        """What the master has recorded of this node. Raises Refused if a newer process has its
        ID."""
        entry = state.nodes.get(self.node_id) or NodeState()
        if entry.incarnation > self.incarnation:
            self.taken_over()
        return entry

    def taken_over(self):
        raise Refused(f"another worker has taken over the node id {self.node_id}: a process that "
                      f"began later goes on with it, this one stops; use another --node-id, or "
                      f"another run folder")

    def merged_step(self, state: SwarmState) -> int:
        """The local step up to which `state` contains the work of this lineage."""
        entry = self.entry(state)
        return entry.local_step if entry.lineage == self.lineage else 0

    def refusals(self, state: SwarmState, since: SwarmState) -> dict:
        """{local step: refusal} of those that `since` does not know."""
        known = since.nodes.get(self.node_id, NodeState()).refusals
        return {r["local_step"]: r for r in self.entry(state).refused if r["number"] > known}


def look(transport, folder: Path, shapes: dict, me: Identity, known: tuple):
    """(tag, Arrival or None) of one look at the hub. `known`: the tag of the state looked at last,
    and the state of the global model installed. An idle look is one HEAD. Raises Unavailable, or
    Refused if this worker cannot go on."""
    (version, tag), (known_tag, before) = transport.head(), known
    if tag == known_tag:
        return tag, None
    at, content = transport.read(STEP, version)
    try:
        state = parse_state(content or b"")
    except Refused as e:        # a master that runs publishes it again
        raise Unavailable(str(e)) from e
    if state.run_id != before.run_id:
        raise Refused("this hub holds another run now; start the worker again to join it")
    if (me.refusals(state, before) or state.outer_step > before.outer_step
            or state.finished != before.finished or state.config != before.config):
        return tag, fetch_global(transport, at, state, folder, shapes, before)
    return tag, None


def delta_path(node_id: str, local_step: int) -> str:
    return f"nodes/{node_id}/delta_{local_step}.safetensors"


def upload(transport, delta: Delta, file: Path, me: Identity, tried: list):
    """Commit a delta. Returns what is there under its name: it, mapped from `file`, or what an
    earlier process of this lineage has sent. A doubtful commit is looked for before it is tried
    again; `tried` is empty, and remembers that.

    Raises Unavailable, or Refused if another worker has the node ID.
    """
    path = delta_path(me.node_id, delta.local_step)
    if not file.exists():
        save(delta.stored, file.with_suffix(".part"), delta.header())
        os.replace(file.with_suffix(".part"), file)
    found = {there: tag for there, _, tag in transport.list(f"nodes/{me.node_id}/")}
    if path in found:
        there = fetch_own(transport, path, found[path], file.with_name("own"), delta.shapes)
        if there is None or there.incarnation < me.incarnation and there.lineage != me.lineage:
            raise Unavailable(f"{path} is not ours: the master removes it")
        if there.incarnation > me.incarnation:
            me.taken_over()
        return there
    if tried:           # its answer was lost: it may have been merged, too
        state = parse_state(transport.read(STEP)[1] or b"")
        refused = [r["local_step"] for r in me.entry(state).refused]
        if me.merged_step(state) >= delta.local_step or delta.local_step in refused:
            return Delta.open(file, delta.shapes)
    tried.append(True)
    transport.commit({path: file}, message=f"{me.node_id} step {delta.local_step}")
    return Delta.open(file, delta.shapes)


def fetch_own(transport, path: str, tag: str, file: Path, shapes: dict) -> Delta | None:
    """Read a delta of this node that waits on the hub. Returns None if the file is damaged. Raises
    Unavailable if it is no longer there, because the master has just merged it."""
    try:
        transport.fetch(path, None, file, tag)
        return Delta.open(file, shapes)
    except FileNotFoundError as e:
        raise Unavailable(str(e)) from e
    except ValueError:
        return None


@dataclass
class Sent:
    """What a node has sent so far, by its own books. A checkpoint holds them."""
    step: int = 0               # of the newest delta
    tokens: int = 0             # trained up to it
    again: int = 0              # steps that were lost on the way, and are in the remainder again
    again_tokens: int = 0       # trained in these


# what a running worker takes over from a master that was started with other settings
LIVE = {"run": ("max_steps", "eval_every", "eval_batches"), "optimizer": ("lr", "grad_clip"),
        "scheduler": ("name", "warmup_steps", "max_steps", "min_lr_ratio"),
        "distributed": ("inner_steps", "codec", "wait", "max_pending", "join_warmup",
                        "poll_interval", "commits_per_hour")}


class DumbDiLoCo:
    """The worker side: the Trainer's coordinator. See TrainerProtocol for what a trainer must
    offer, LocalModel for the algebra.

    The training thread owns all state. Transfers are jobs in the background, one up and one down
    at a time, which hand back a record. Training waits for them only at the start, at the end, and
    at each boundary with settings["wait"]. Trouble that does not pass ends the training with its
    state saved, and is in `failed`.
    """
    job = Job

    def __init__(self, transport, node_id: str, settings: dict | None = None):
        if not NODE_ID.fullmatch(node_id):
            raise ValueError(f"distributed.node_id={node_id!r}: write --node-id=NAME, up to 64 "
                             f"letters, digits, dots, dashes, underscores")
        self.transport, self.settings = transport, complete(settings)
        self.node_id, self.me = node_id, Identity.new(node_id)
        self.work = workspace()
        self.folder = Path(self.work.name)
        self.state = None               # SwarmState of the global model installed last
        self.local = None               # LocalModel
        self.saved = None               # the state of a checkpoint, to be reconciled in start()
        self.sent = Sent()
        self.first_step = 0             # the local step at which this lineage joined
        self.ramp_from = None           # the step since which the learning rate ramps up
        self.target = 0                 # mean progress at which the swarm ends
        self.longer = 0                 # steps that this inner loop is longer, see keep_in_step
        self.in_step_from = 0           # the step of the first delta since the last longer loop
        self.claim = False              # an older process of this lineage may be alive
        self.losses = [0.0, 0]          # sum and number since the newest delta
        self.pushes = deque(maxlen=1024)    # Unix times of the deltas
        self.pushed, self.loop = 0.0, 0.0   # when the newest was sent; seconds since that before
        self.uploading, self.looking = None, None   # (Delta, Job); Job
        self.next_look, self.tag = 0.0, ""
        self.errors = deque()           # what the jobs have met, to be told by the training thread
        self.closing, self.warned, self.failed = False, False, None

    # the start

    def start(self, trainer):
        """Join the swarm, or go on. Waits, saying so, until there is a global model."""
        check_trainer(trainer)
        self.local, self.target = LocalModel(trainer.model), trainer.config["run"]["max_steps"]

        def failed(*error):
            self.errors.append(error)
            self.tell(trainer)

        def stopped():
            return bool(trainer.stop_signal)

        def arrive():
            # what waits is listed first: what the master merges meanwhile is in the state
            own = [(path, tag) for path, _, tag in self.transport.list(f"nodes/{self.node_id}/")]
            at, state = read_state(self.transport, failed, stopped)
            arrival = fetch_global(self.transport, at, state, self.folder, self.local.shapes)
            waiting = {}
            for path, tag in own:
                if match := DELTA.fullmatch(path):
                    waiting[int(match[2])] = fetch_own(
                        self.transport, path, tag, self.folder / Path(path).name, self.local.shapes)
            return arrival, waiting
        try:
            arrival, waiting = retry(arrive, failed, stopped)
        except Unavailable:     # only once the trainer was told to stop
            return
        self.state = arrival.state
        if self.saved and self.saved["run_id"] == self.state.run_id:
            self.reconcile(trainer, arrival, waiting)
        else:
            self.join(trainer, arrival, waiting)
        self.pushed = time.monotonic()
        trainer.emit("join", f"{trainer.progress()} | {self.node_id} joined "
                     f"at outer step {self.state.outer_step}",
                     outer_step=self.state.outer_step, step=trainer.step)
        self.set_end(trainer)

    def join(self, trainer, arrival: Arrival, waiting: dict):
        """As a new node, at the swarm's step."""
        if self.saved:
            write_line("notice   the checkpoint is of another run of this hub: joining as a new "
                       "node")
        entry = self.state.nodes.get(self.node_id, NodeState())
        self.me = Identity.new(self.node_id, after=entry.incarnation)
        self.local.place(arrival, None)
        # beyond what waits there of an earlier worker of this name: nothing is overwritten
        self.move_to(trainer, max([self.state.progress, entry.local_step, *waiting]))
        self.sent, self.first_step = Sent(trainer.step, trainer.tokens), trainer.step
        self.ramp_from = trainer.step or None

    def move_to(self, trainer, step: int):
        trainer.step = step
        trainer.position = step * trainer.config["data"]["target_batch_size"]

    def reconcile(self, trainer, arrival: Arrival, waiting: dict):
        """After a restart: what the hub has of this lineage, waiting or merged, is not trained
        again."""
        saved, entry = self.saved, self.state.nodes.get(self.node_id, NodeState())
        seen = [saved["incarnation"], *(d.incarnation for d in waiting.values() if d)]
        if entry.lineage == saved["lineage"]:
            seen.append(entry.incarnation)
        self.me = Identity.new(self.node_id, saved["lineage"], max(seen))
        merged = self.me.merged_step(self.state)
        self.local.in_flight = [delta for step, delta in sorted(waiting.items()) if step > merged
                                and delta and delta.lineage == self.me.lineage]
        known = max([merged, *(delta.local_step for delta in self.local.in_flight)])
        self.sent, remainders = Sent(**saved["sent"]), saved["remainders"]
        unconfirmed = saved["unconfirmed"] and Delta(**saved["unconfirmed"])
        if known > trainer.step:        # sent after the checkpoint was written
            remainders, self.sent.tokens = None, trainer.tokens
            self.move_to(trainer, known)
        elif unconfirmed and known < unconfirmed.local_step:    # it did not arrive
            for name, rows in pieces(self.local.shapes):
                remainders[name][rows] += unconfirmed.piece(name, rows)
            self.sent.step -= unconfirmed.steps
            self.sent.tokens -= unconfirmed.tokens
        self.sent.step = max(self.sent.step, known)
        # a lineage that has left the state begins anew there
        left = saved["recorded"] and not merged
        self.first_step = self.sent.step if left else saved["first_step"]
        self.local.place(arrival, remainders)
        self.saved = None

    def state_dict(self) -> dict:
        """What a checkpoint holds."""
        if self.state is None:
            return self.saved
        unconfirmed = None
        if self.uploading:
            delta = self.uploading[0]
            unconfirmed = {**vars(delta), "stored": dict(delta.stored)}
        return {"lineage": self.me.lineage, "incarnation": self.me.incarnation,
                "run_id": self.state.run_id, "first_step": self.first_step,
                "recorded": self.me.merged_step(self.state) > 0, "sent": vars(self.sent),
                "remainders": self.local.remainders(), "unconfirmed": unconfirmed}

    def load_state_dict(self, state: dict):
        """Raises ValueError for what state_dict() of this version has not made."""
        try:
            Sent(**state["sent"])
            if state["unconfirmed"]:
                Delta(**state["unconfirmed"])
            for key in ("lineage", "incarnation", "run_id", "first_step", "recorded", "remainders"):
                state[key]
        except (KeyError, TypeError) as e:
            raise ValueError(f"the checkpoint is of another version of this worker ({e}): move its "
                             f"folder away, and the node joins anew at the swarm's step") from None
        self.saved = state

    # between the steps of the trainer

    def schedule_step(self, step: int) -> float:
        """The step whose learning rate counts: the mean progress of the nodes as far as the ledger
        says, and this node's steps since. So all decay together, with the tokens of the swarm,
        however fast each is."""
        mine = self.me.merged_step(self.state)
        if not mine:
            return step
        others = members(self.state.nodes, self.state.outer_step) - {self.node_id}
        steps = [mine, *(self.state.nodes[node].local_step for node in others)]
        return step - mine + mean_progress(steps)

    def lr_scale(self, step: int) -> float:
        """A node that has joined a running swarm has cold Adam moments: it takes small steps
        first."""
        if self.ramp_from is None:
            return 1.0
        return min(1.0, (step + 1 - self.ramp_from) / max(1, self.settings["join_warmup"]))

    def after_step(self, trainer):
        loss = trainer.last_loss
        self.losses = [self.losses[0] + (loss.detach() if hasattr(loss, "detach") else loss),
                       self.losses[1] + 1]
        self.take_results(trainer)
        if trainer.step - self.sent.step >= self.loop_steps() + self.longer or self.claim:
            self.push(trainer)
            # the synchronous algorithm: go on when the round with this node's work is published
            while (self.settings["wait"] and self.local.in_flight and not trainer.stop_signal
                   and not self.state.finished):
                self.take_results(trainer)
                time.sleep(0.02)

    def finish(self, trainer):
        """At the end of training: send the rest, and wait until it has arrived."""
        if self.state is None:
            return
        began, told = time.monotonic(), False
        while not trainer.stop_signal and (self.uploading or self.sent.step < trainer.step):
            self.take_results(trainer)
            self.push(trainer, last=True)
            if not told and time.monotonic() - began > 5:
                write_line("waiting  for the upload of the last delta; Ctrl-C leaves it to the "
                           "next start")
                told = True
            # a commit limit may make it wait for its turn
            wait(0.02 if self.uploading else 2.0, lambda: trainer.stop_signal)
        self.closing = True
        for job in [self.uploading and self.uploading[1], self.looking]:
            if job:             # a commit under way is better not cut off
                job.thread.join(timeout=1 if trainer.stop_signal else 10)
        self.take_results(trainer)
        if self.local.ahead:    # what is evaluated and saved now is not
            self.local.look_ahead(0.0)

    # sending

    def ahead(self) -> float:
        """How far the weights go ahead of G while a delta is in flight: the coming outer step,
        outer_lr * (g + f * mu * (mu**f * buf + g)), without its g."""
        # keep: f. Where few nodes contribute, G moves by less than the momentum says. A worker that
        # ran ahead as if all did would send the difference as work, and the swarm diverged.
        mu, f = self.state.momentum, self.state.part
        return 0.0 if self.settings["wait"] else self.state.outer_lr * f * mu * mu ** f

    def loop_steps(self) -> int:
        """Optimizer steps of this node's inner loop.

        A node of the median pace trains inner_steps, a fast one more: all loops take the same
        time. So the deltas of a round come together, and none gets old while it waits for others.
        Until its pace is known a node trains a tenth of inner_steps: the first rounds come soon,
        and all come into step. (Validation loss 1.5235 instead of 1.5344, mean of three seeds.)
        """
        inner_steps, nodes = self.settings["inner_steps"], self.state.nodes
        mine = nodes.get(self.node_id, NodeState()).pace
        if self.settings["wait"]:
            return inner_steps
        if not mine:
            return max(1, inner_steps // 10)
        active = active_nodes(nodes, self.state.outer_step) | {self.node_id}
        ratio = statistics.median(nodes[node].pace for node in active) / mine
        return max(1, round(inner_steps * min(LOOP_RANGE, max(1 / LOOP_RANGE, ratio))))

    def keep_in_step(self):
        """Train one longer inner loop if the newest merged delta was on the hub too early: it has
        waited for those of others, and got old."""
        entry = self.state.nodes.get(self.node_id, NodeState())
        # keep: deltas sent before a longer loop have waited, too; they must not make another longer
        if self.settings["wait"] or entry.local_step < self.in_step_from or not entry.pace:
            return
        self.longer = round(min(entry.waited / entry.pace, self.loop_steps() / 2))
        if self.longer:
            self.in_step_from = math.inf

    def push(self, trainer, last=False):
        """Cut the next delta off the remainder, and send it in the background; unless one is being
        sent, or the master does not merge."""
        if self.uploading or self.sent.step == trainer.step:
            return
        if not last and len(self.local.in_flight) >= self.settings["max_pending"]:
            if not self.warned:
                write_line(f"waiting  {len(self.local.in_flight)} deltas are not merged yet: is "
                           f"master.py running? Training goes on, the next delta holds it all")
            self.warned = True
            return
        if self.over_commit_budget(last):
            return
        stored = self.local.encode(self.settings["codec"])
        if stored is None:
            return self.fail(trainer, Refused(f"the weights are not finite at step {trainer.step}: "
                                              f"nothing was sent"))
        delta = self.new_delta(trainer, last, stored)
        self.local.in_flight = [*self.local.in_flight, delta]
        self.sent, self.losses = Sent(trainer.step, trainer.tokens), [0.0, 0]
        if self.longer:
            self.longer, self.in_step_from = 0, trainer.step
        self.claim = False
        self.uploading = delta, self.job(self.upload, delta)
        if not self.local.ahead:
            self.local.look_ahead(self.ahead())

    def over_commit_budget(self, last: bool) -> bool:
        """Whether a commit now would be more than this node's share. How many share is known once
        the master has recorded this node: its second delta waits for that."""
        entry = self.state.nodes.get(self.node_id, NodeState())
        recorded = entry.incarnation == self.me.incarnation
        if self.pushes and not recorded and self.transport.limited and not last:
            return self.settings["commits_per_hour"] > 0
        return not may_commit(self.settings, self.transport, self.state, self.pushes, last)

    def new_delta(self, trainer, last: bool, stored: dict) -> Delta:
        now = time.monotonic()
        self.loop, self.pushed = now - self.pushed, now
        self.pushes.append(time.time())
        loss, count = self.losses
        return Delta(
            run_id=self.state.run_id, node_id=self.node_id, lineage=self.me.lineage,
            incarnation=self.me.incarnation, local_step=trainer.step, first_step=self.first_step,
            base_outer_step=self.state.outer_step, steps=trainer.step - self.sent.step,
            tokens=trainer.tokens - self.sent.tokens + self.sent.again_tokens,
            again=self.sent.again, loss=float(loss) / count if count else float(trainer.last_loss),
            seconds=self.loop, final=self.at_end(trainer, last), codec=self.settings["codec"],
            shapes=self.local.shapes, stored=stored)

    def arrived(self, trainer, delta: Delta, there: Delta):
        """A delta is on the hub: what counts is what is there."""
        if there.incarnation != self.me.incarnation:    # from an older process of this lineage:
            self.claim = True                           # if it is alive, it sees the next delta
        delta.stored, delta.codec, delta.bytes = there.stored, there.codec, there.bytes
        seconds = time.monotonic() - self.pushed
        trainer.emit("push", f"{trainer.progress()} | {delta.steps} steps | "
                     f"{delta.bytes / 1e6:.1f} MB | {seconds:.1f} s", step=delta.local_step,
                     base_outer_step=delta.base_outer_step, steps=delta.steps, bytes=delta.bytes,
                     seconds=seconds)

    # receiving

    def fates(self, state: SwarmState, refused: dict) -> dict:
        """{local step: fate} of the deltas in flight, see LocalModel.install."""
        entry, merged, fates = self.me.entry(state), self.me.merged_step(state), {}
        for step in [delta.local_step for delta in self.local.in_flight]:
            if step in refused:
                fates[step] = "refused"
            elif step > merged:
                fates[step] = "pending"
            else:
                missed = any(after < step <= up_to for after, up_to in entry.gaps)
                fates[step] = "missed" if missed else "merged"
        return fates

    def install(self, trainer, arrival: Arrival):
        """Move to a newer global model without losing local work. Raises Refused."""
        began, before, state = time.monotonic(), self.state, arrival.state
        merged, refused = self.me.merged_step(state), self.me.refusals(state, before)
        fates = self.fates(state, refused)
        self.take_over_settings(trainer, before.config, state.config)
        self.state, self.warned = state, False
        if self.me.merged_step(before) and not merged:
            self.first_step = self.sent.step    # it has left the state, and begins anew there
        self.take_fates(trainer, fates)
        self.keep_in_step()
        # an upload of an older process has landed behind our back: the new model has these steps
        redone = merged > self.sent.step
        if redone:
            trainer.step = self.sent.step = max(merged, trainer.step)
            self.claim = True
        restart = any(refusal["restart"] for refusal in refused.values())
        foreseen = self.local.ahead and state.outer_step == before.outer_step + 1
        stay = self.share_that_stays(trainer) if foreseen else 0.0
        self.local.install(arrival, fates, stay, self.ahead(), forget=redone or restart)
        for step, refusal in refused.items():
            trainer.emit("refused", f"{trainer.progress()} | the delta of step {step}: "
                         f"{refusal['reason']}", step=step, reason=refusal["reason"])
        if restart:
            self.sent.again = self.sent.again_tokens = 0
            self.ramp_from = trainer.step
            write_line(f"notice   {self.node_id} starts again from the global model: its loss was "
                       f"far above the others'; is its learning rate right?")
        self.set_end(trainer)
        trainer.emit("install", f"{trainer.progress()} | outer step {state.outer_step}",
                     step=trainer.step, outer_step=state.outer_step,
                     seconds=time.monotonic() - began)

    def take_fates(self, trainer, fates: dict):
        """What the fates mean for the books of this node."""
        for delta in self.local.in_flight:
            if fates[delta.local_step] == "missed":
                self.sent.again += delta.steps + delta.again
                self.sent.again_tokens += delta.tokens
        if self.uploading and fates[self.uploading[0].local_step] != "pending":
            delta = self.uploading[0]       # in the new model before its own answer has come
            self.uploading = None
            self.arrived(trainer, delta, delta)

    def share_that_stays(self, trainer) -> float:
        """How much of the prediction error stays in the weights, 0 to 1.

        Delay compensation. The steps since the newest merged delta started from a PREDICTED global
        model. Along steep directions of the loss they have corrected its error already: to remove
        the whole error would correct it twice. Along flat ones the errors of the nodes cancel.
        After delays of 0.17, 0.44 and 0.77 inner loops the best shares were 0, 0.3 to 0.6, and 0.5
        to 0.75. Early in a run, long loops take the nodes far apart, and less may stay: the share
        grows with the outer momentum.
        """
        inner_steps = self.settings["inner_steps"]
        merged = max(self.me.merged_step(self.state), self.first_step)
        delay = (trainer.step - merged) / self.loop_steps()
        share = min(FOLLOW_LATER, 2 * delay * delay)
        return share * min(1.0, max(SHORT_LOOP / inner_steps, self.state.momentum))

    def take_over_settings(self, trainer, old: dict, new: dict):
        """Settings with which the master was started again; a worker's own flags stay."""
        for section, key, before, now in changes(old, new):
            own = trainer.config.get(section, {})
            own = self.settings if section == "distributed" else own
            is_target = (section, key) == ("run", "max_steps")
            mine = self.target if is_target else own.get(key, before)
            if mine != before or type(mine) is not type(now):
                continue
            if key not in LIVE.get(section, ()):
                write_line(f"notice   the master has {section}.{key}={now} now, not {before}: it "
                           f"counts here when this worker starts again")
                continue
            if section == "distributed":
                try:
                    complete({key: now})
                except ValueError as e:
                    raise Refused(f"the hub's settings: {e}") from None
            if is_target:
                self.target = now
                scheduler = trainer.config.get("scheduler", {})
                if scheduler.get("max_steps") == before:    # the learning rate ends with the run
                    scheduler["max_steps"] = now
            else:
                own[key] = now
            write_line(f"setting  {section}.{key} is {now} now, was {before}: the master says so")

    # the end

    def at_end(self, trainer, last: bool) -> bool:
        """Whether this node's part of the run is done. `last`: its training has ended, though the
        swarm may have moved the end since. If the master has stopped early it may go on later."""
        target = target_of(self.state.config) or self.target
        finished = self.state.finished and self.state.progress >= target
        return (finished or trainer.step >= self.end(trainer)
                or last and not self.state.finished)

    def end(self, trainer) -> int:
        """The local step at which the swarm's mean progress reaches the target."""
        return trainer.step + math.ceil(self.target - self.schedule_step(trainer.step))

    def set_end(self, trainer):
        """A fast node trains for longer, a slow one ends earlier: the swarm ends as one."""
        end = trainer.step if self.state.finished else max(trainer.step, self.end(trainer))
        trainer.config["run"]["max_steps"] = end

    def fail(self, trainer, error: Exception):
        self.failed, trainer.stop_signal = error, type(error).__name__

    # the jobs: they read what they are given, and hand back a record

    def take_results(self, trainer):
        """What the jobs have brought since the last step; and the next look."""
        self.tell(trainer)
        for job in [self.uploading and self.uploading[1], self.looking]:
            # Unavailable comes only at the end of training: the next start goes on
            if job and job.error and not isinstance(job.error, Unavailable):
                return self.fail(trainer, job.error)
        if self.uploading and self.uploading[1].result:
            (delta, job), self.uploading = self.uploading, None
            self.arrived(trainer, delta, job.result)
        if self.looking and self.looking.result:
            (self.tag, arrival), self.looking = self.looking.result, None
            try:
                if arrival:
                    self.install(trainer, arrival)
            except Refused as e:
                return self.fail(trainer, e)
        self.begin_look()

    def begin_look(self):
        now = time.monotonic()
        if self.looking is None and now >= self.next_look and not (self.closing or self.failed):
            self.looking = self.job(self.look, (self.tag, self.state))
            pause = poll_interval(self.settings, self.transport, self.loop)
            self.next_look = now + pause * random.uniform(0.8, 1.2)

    def tell(self, trainer):
        while self.errors:
            error, retry_in = self.errors.popleft()
            trainer.emit("hub_error", f"{error}; next try in {retry_in:.0f} s", error=error,
                         retry_in=retry_in)

    def patiently(self, work):
        return retry(work, lambda *error: self.errors.append(error), lambda: self.closing)

    def look(self, known: tuple):
        return self.patiently(functools.partial(
            look, self.transport, self.folder, self.local.shapes, self.me, known))

    def upload(self, delta: Delta) -> Delta:
        file = self.folder / f"sent_{delta.local_step}"
        return self.patiently(functools.partial(
            upload, self.transport, delta, file, self.me, tried=[]))
