"""
DumbDiLoCo: many machines train one model with nothing between them but a repository of files.

    hub = FolderTransport("./runs/hub")
    MasterOuterLoop(hub, settings, weights).run()                                      # one machine
    Trainer(model, config, data, coordinator=DumbDiLoCo(hub, "a", settings)).train()   # each node

The algorithm (DiLoCo, Douillard et al. 2023, made asynchronous):
  1. a worker trains `inner_steps` optimizer steps and uploads its pseudo-gradient, baseline -
     current weights;
  2. it trains on; its baseline moves by what it has sent;
  3. the master adds up the deltas of each node, averages over the nodes, takes one Nesterov step on
     the global model and publishes weights, momentum and books in ONE commit, which also deletes
     what it has merged;
  4. a worker that sees a new global moves to it and keeps all it has learned that this global does
     not hold yet. It trains where it expects the next global to be; of the error it follows a part
     only, because the steps since have answered to it already (delay compensation).
Sign, once for all: delta = before - after, so the global model moves by MINUS the averaged delta.

  global/latest.safetensors                         the global model, fp32
  global/step_count.json                            outer step, hashes, books: "the state"
  global/update_<outer_step>.safetensors            how it changed in the last few rounds, coded
  global/momentum.safetensors                       outer momentum, fp32
  global/residual.safetensors                       what rounding kept back from the updates, bf16
  global/history.jsonl                              a line per outer round
  nodes/<node_id>/delta_<local_step>.safetensors    waiting to be merged
  config.json, model.safetensors, tokenizer*.json   the same model, as transformers wants it
  README.md, loss.svg                               the page: progress, curve, nodes, how to join

Trust: whoever may write to the repository may move the model; what a master can check (shapes, run,
replays, numbers that are none, outsized norms) it does. It does not authenticate nodes, hide data
or keep a fast network busy.
"""
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import statistics
import struct
import tempfile
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

STEP, WEIGHTS = "global/step_count.json", "global/latest.safetensors"
MOMENTUM, RESIDUAL = "global/momentum.safetensors", "global/residual.safetensors"
HISTORY, UPDATE = "global/history.jsonl", "global/update_{}.safetensors"
PAGE, CURVE, MODEL = "README.md", "loss.svg", "model.safetensors"
PAGE_EVERY = 300        # s between two versions of the page
NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DELTA = re.compile(r"nodes/([^/]+)/delta_(\d{1,18})\.safetensors")
ACTIVE_ROUNDS = 4       # a node that has contributed to none of this many rounds is not waited for
UPDATES = 8             # how many of the newest changes of the global model are kept
STAY = 0.75             # part of an error in what was expected of G that a worker does not follow
SHORT = 25              # steps of an inner loop that leave the nodes close from the first round on


class Conflict(Exception):
    """The repository has moved since the version a commit was computed from."""


class Unavailable(Exception):
    """The repository, or this machine's disk, cannot be used now; a commit may or may not have been
    made. Arguments: what, and the seconds to wait that it asked for, if it did."""


class Refused(Exception):
    """Trying again will not help: no rights, no such repository, taken over by another."""


class Superseded(Refused):
    """Another master has published."""

# ---- codecs: how a delta is written
# Matrices in the codec's form; vectors, and what is smaller than a block, in fp32. The integer
# codecs keep (code - middle) * scale, with a scale for each block of 64 numbers; scales are bf16,
# because fp16 would underflow at the size of deltas.

BLOCK = 64
CODECS = {"fp32": torch.float32, "bf16": torch.bfloat16,
          "int8": (8, 127), "int4": (4, 7), "int2": (2, 1.5)}    # (bits of a code, middle)


def form(shape, codec: str):
    """How a tensor of this shape is stored: a dtype, or (bits, middle)."""
    return CODECS[codec] if len(shape) > 1 and math.prod(shape) >= BLOCK else torch.float32


def stored_shapes(shapes: dict, codec: str) -> dict:
    """{name: (dtype, shape)} of the tensors in a file that holds tensors of these shapes."""
    stored = {}
    for name, shape in shapes.items():
        kind, blocks = form(shape, codec), math.ceil(math.prod(shape) / BLOCK)
        if isinstance(kind, torch.dtype):
            stored[name] = kind, tuple(shape)
        else:
            stored[name] = torch.uint8, (blocks, BLOCK * kind[0] // 8)
            stored["scale:" + name] = torch.bfloat16, (blocks, 1)
    return stored


def encode(tensors: dict, codec: str) -> dict:
    """What is stored of tensors."""
    stored = {}
    for name, tensor in tensors.items():
        kind = form(tensor.shape, codec)
        if isinstance(kind, torch.dtype):
            stored[name] = tensor.to(kind).contiguous()
            continue
        bits, middle = kind
        blocks = F.pad(tensor.float().flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
        # four levels reach furthest when a step is the block's standard deviation; with more, the
        # largest number of the block gets the outermost code
        scale = (torch.linalg.vector_norm(blocks, dim=1, keepdim=True) / BLOCK ** 0.5 if bits == 2
                 else blocks.abs().amax(1, keepdim=True) / middle).bfloat16()
        codes = blocks / scale.float().clamp(min=1e-30)
        codes = codes.add_(middle).round_().clamp_(0, 2 * middle).to(torch.uint8)
        stored[name] = codes[:, ::8 // bits].clone()
        for i in range(1, 8 // bits):
            stored[name] |= codes[:, i::8 // bits] << (i * bits)
        stored["scale:" + name] = scale
    return stored


def decode(stored: dict, shapes: dict, codec: str) -> dict:
    """What every reader makes of the stored tensors: exact, the same on each machine."""
    return {name: decode_one(stored, name, shape, codec) for name, shape in shapes.items()}


def decode_one(stored, name: str, shape, codec: str):
    kind = form(shape, codec)
    if isinstance(kind, torch.dtype):
        return stored[name].float()
    bits, middle = kind
    blocks = torch.empty(len(stored[name]), BLOCK)
    for i in range(8 // bits):
        blocks[:, i::8 // bits] = (stored[name] >> (i * bits)) & (2 ** bits - 1)
    blocks.sub_(middle).mul_(stored["scale:" + name])
    return blocks.flatten()[:math.prod(shape)].view(shape)


def save(tensors: dict, file: Path, metadata: dict | None = None) -> dict:
    """Write a safetensors file; its {"sha256", "size"}. Raises Unavailable if the disk is full."""
    try:
        save_file(tensors, file, metadata=metadata)
        return {"sha256": sha256(file), "size": file.stat().st_size}
    except (SafetensorError, OSError) as e:
        raise Unavailable(f"cannot write {file}: {e}") from e


def load_coded(file: Path, shapes: dict):
    """(header, decoded tensors) of a delta or an update. Raises ValueError if it is neither."""
    try:
        with safe_open(file, "pt") as f:
            header, stored = f.metadata() or {}, {k: f.get_tensor(k) for k in f.keys()}
        if ({k: (v.dtype, tuple(v.shape)) for k, v in stored.items()}
                != stored_shapes(shapes, header["codec"])):
            raise ValueError(f"{file.name} holds other tensors")
        return header, decode(stored, shapes, header["codec"])
    except (SafetensorError, KeyError, TypeError, RuntimeError) as e:
        raise ValueError(f"{file.name} is no coded file: {e}") from e

# ---- the outer optimizer: no files, no network


class NesterovOuterOptimizer:
    """Outer step over named tensors, with a part f = n / K of the nodes contributing; those count
    that are at work or have finished.

        mu  = momentum * min(1, (outer_step + 1) / warmup)      warmup 0: constant
        buf = mu**f * buf + g
        W  -= lr * (g + f * mu * buf)

    With f = 1 and no warmup this is torch.optim.SGD(momentum=mu, nesterov=True). Floating buffers
    of the model (BatchNorm statistics) take the plain average instead.
    """

    def __init__(self, lr: float, momentum: float, warmup: int = 0):
        self.lr, self.momentum, self.warmup = lr, momentum, warmup

    def mu(self, outer_step: int) -> float:
        return self.momentum * (min(1.0, (outer_step + 1) / self.warmup) if self.warmup else 1.0)

    def step(self, weight, buf, g, f: float, outer_step: int):
        """New (weight, buf) of one tensor; the arguments stay as they are."""
        mu = self.mu(outer_step)
        buf = mu ** f * buf + g
        return weight - self.lr * (g + f * mu * buf), buf

# ---- patience


def wait(seconds: float, stopped):
    """Sleep, with jitter so that nodes do not march in step, waking up early when stopped()
    holds."""
    end = time.monotonic() + seconds * random.uniform(0.8, 1.2)
    while time.monotonic() < end and not stopped():
        time.sleep(min(0.1, max(0.0, end - time.monotonic())))


def say(error: str, retry_in: float):
    print(f"hub_error {error}; next try in {retry_in:.0f} s", flush=True)


def retry(work, failed=say, stopped=lambda: False, longest: float = 60.0):
    """work(), again and again while it raises Unavailable: after 1 s, 2 s, ... up to `longest`, or
    what the repository asked for. failed(error, seconds to the next try) is told each time.

    Raises Unavailable once stopped() holds; what does not pass (Refused) at once.
    """
    pause = 1.0
    while True:
        try:
            return work()
        except Unavailable as e:
            if stopped():
                raise
            seconds = max(pause, e.args[1] if len(e.args) > 1 else 0.0)
            failed(e.args[0], seconds)
            wait(seconds, stopped)
            pause = min(longest, pause * 2)

# ---- transports
# head() -> (version, tag of the state): the tag changes when global/step_count.json does
# read(path, version=None) -> (version, bytes, or None if there is no such file): a small file
# fetch(path, version, to, tag=""): a file, put at `to`; FileNotFoundError if it is gone
# list(prefix, version=None) -> [(path, size, tag)]
# commit(add, delete, expect) -> version: all or nothing, Conflict if `expect` is given and is not
#   the head; add is {path: bytes or a file}
# A tag is a hash of the content (git's or sha256), "" where there is none.


def sha256(path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def fits(content, tag: str) -> bool:
    """Whether bytes, or a file, are what the tag says."""
    if len(tag) == 64:
        return tag == (hashlib.sha256(content).hexdigest() if isinstance(content, bytes)
                       else sha256(content))
    data = content if isinstance(content, bytes) else Path(content).read_bytes()
    return tag == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def twins_of(add: dict) -> dict:
    """{path: an earlier path that gets the same file}."""
    first = {}
    return {path: first[content] for path, content in add.items()
            if not isinstance(content, bytes) and first.setdefault(content, path) != path}


class FolderTransport:
    """The repository as a plain folder: one machine, or a shared file system with working locks.

    A commit stages its files, then writes a redo log: from that rename on it is made, and whoever
    takes the lock next finishes it. A kill at any moment leaves the old state or the new one.
    A commit replaces files and never writes in them, so a file that was opened or linked stays.
    """
    least_poll, limited = 0.02, False       # seconds between looks; commits are counted

    def __init__(self, root):
        self.root = Path(str(root).removeprefix("file://"))
        self.own = self.root / ".hub"
        self.log, self.version_file = self.own / "redo.json", self.own / "version"
        self.lock = FileLock(self.own / "lock")

    @contextlib.contextmanager
    def errors(self):
        try:
            yield
        except FileNotFoundError:
            raise
        except (PermissionError, NotADirectoryError) as e:
            raise Refused(f"{self.root}: {e.strerror}") from e
        except OSError as e:  # a full disk, a network drive that is away; a lock not had in time
            raise Unavailable(f"{self.root}: {e}") from e

    @contextlib.contextmanager
    def locked(self):
        if not os.access(self.own, os.W_OK):    # nothing there yet, or ours to read only
            with self.errors():
                yield
            return
        with self.errors(), self.lock.acquire(timeout=60):
            if self.log.exists():
                self.redo(json.loads(self.log.read_text()))
            yield

    def version(self) -> str:
        return self.version_file.read_text() if self.version_file.exists() else "0"

    def redo(self, entry: dict):
        """Carry out a logged commit; every step may be done already."""
        for path, staged in entry["add"].items():
            if (self.own / staged).exists():
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                os.replace(self.own / staged, self.root / path)
        for path in entry["delete"]:
            (self.root / path).unlink(missing_ok=True)
        self.write(self.version_file, entry["version"].encode())
        self.log.unlink()
        for leftover in self.own.glob("staged_*"):
            leftover.unlink()

    def write(self, path: Path, content):
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as f:
            if isinstance(content, bytes):
                f.write(content)
            else:
                with open(content, "rb") as source:
                    shutil.copyfileobj(source, f, 1 << 20)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)

    def head(self):
        version, content = self.read(STEP)
        return version, hashlib.sha256(content).hexdigest() if content else ""

    def read(self, path: str, version=None):
        with self.locked():
            file = self.root / path
            return self.version(), file.read_bytes() if file.exists() else None

    def fetch(self, path: str, version, to: Path, tag: str = ""):
        with self.errors():
            to.parent.mkdir(parents=True, exist_ok=True)
            to.unlink(missing_ok=True)
            try:
                os.link(self.root / path, to)
            except FileNotFoundError:
                raise
            except OSError:                     # another disk
                shutil.copyfile(self.root / path, to)
            if tag and not fits(to, tag):       # replaced since the state was read, or damaged
                raise Unavailable(f"{self.root / path} is not what {STEP} says")

    def list(self, prefix: str, version=None):
        found = []
        with self.locked():
            for f in sorted((self.root / prefix).rglob("*")):
                with contextlib.suppress(FileNotFoundError):    # who may not lock sees it change
                    if f.is_file():
                        found.append((f.relative_to(self.root).as_posix(), f.stat().st_size, ""))
        return found

    def commit(self, add: dict, delete=(), expect=None, message="") -> str:
        for path in [*add, *delete]:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise Refused(f"{path} is no path in the repository")
        with self.errors():
            self.own.mkdir(parents=True, exist_ok=True)
        with self.locked():
            head = self.version()
            if expect is not None and head != expect:
                raise Conflict(f"{self.root} is at {head}, not {expect}")
            staged = {path: f"staged_{i}" for i, path in enumerate(add)}
            twins = twins_of(add)
            try:
                for path, content in add.items():
                    try:
                        os.link(self.own / staged[twins[path]], self.own / staged[path])
                    except (KeyError, OSError):     # no twin, or no links here
                        self.write(self.own / staged[path], content)
            except OSError:
                for leftover in self.own.glob("staged_*"):
                    leftover.unlink()
                raise
            entry = {"version": str(int(head) + 1), "add": staged, "delete": list(delete)}
            self.write(self.log, json.dumps(entry).encode())        # the commit is made
            self.redo(entry)
            return entry["version"]

    def squash(self):
        """A folder keeps no history."""


class HubTransport:
    """The repository as a model repo on the Hugging Face Hub, through huggingface_hub.

    The client retries no commit, waits for ever on a silent server, takes an old file for a new one
    when a HEAD fails and checks only sizes: hence a timeout, our own retry (above), a resolved
    commit for every read and a hash for every file. The token is the client's own: HF_TOKEN, or the
    login.
    """
    least_poll, limited = 2.0, True

    def __init__(self, repo: str, create=False, private=True):
        import huggingface_hub as hub
        from huggingface_hub.utils import _http, disable_progress_bars
        self.hub, self.repo, self.api = hub, repo, hub.HfApi()
        self.net_error = hub.errors.HfHubHTTPError.__bases__[0]  # httpx's or httpx2's, by version

        def client():
            c = _http.default_client_factory()
            c.timeout = 60
            return c
        hub.set_client_factory(client)
        disable_progress_bars()
        hub.utils.logging.set_verbosity_error()     # what goes wrong is told here, once
        if create:
            retry(lambda: self.create(private))

    def create(self, private: bool):
        with self.errors():
            self.api.create_repo(self.repo, private=private, exist_ok=True)

    @contextlib.contextmanager
    def errors(self):
        """What can pass is Unavailable, what cannot is Refused, a moved head is a Conflict, a file
        or a version that is not there is a FileNotFoundError."""
        errors = self.hub.errors
        try:
            yield
        except (self.net_error, OSError, RuntimeError) as e:  # RuntimeError: an upload that failed
            while not isinstance(e, errors.HfHubHTTPError) and e.__cause__:
                e = e.__cause__
            raise self.meaning(e) from e
        except (KeyError, TypeError, json.JSONDecodeError) as e:     # a proxy's own page
            raise Unavailable(f"{self.repo}: no answer of a Hub, {type(e).__name__} {e}") from e
        except ValueError as e:     # a bad name of a repo, bad metadata of a page
            raise Refused(f"{self.repo}: {' '.join(str(e).split())}") from e

    def meaning(self, e) -> Exception:
        errors, response = self.hub.errors, getattr(e, "response", None)
        said = " ".join((getattr(e, "server_message", None) or str(e)).split())
        said = re.split(r" for url| \(Request ID| For more", said)[0][:160].rstrip(".")
        if isinstance(e, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
            return FileNotFoundError(f"{self.repo}: {said}")
        no_rights = "; is HF_TOKEN set, and may it write?"
        if response is None:    # hf_xet tells a status in words only
            kind = Refused if re.search(r"\b(401|403)\b", said) else Unavailable
            return kind(f"{self.repo}: {type(e).__name__} {said}"
                        + no_rights * (kind is Refused))
        status, headers = response.status_code, response.headers
        said = f"{self.repo}: {status} {said}"
        if status == 412:
            return Conflict(said)
        if status in (400, 401, 402, 403, 404, 413, 422):
            return Refused(said + no_rights * (status != 400))
        asked = (re.fullmatch(r"(\d+)", headers.get("Retry-After", ""))
                 or re.search(r"r=0;t=(\d+)", headers.get("RateLimit", "")))
        return Unavailable(said, float(asked[1]) if asked else 60.0 if status == 429 else 0.0)

    def head(self):
        """One HEAD: on main, the answer for any path names the newest commit."""
        try:
            with self.errors():
                answer = self.hub.get_hf_file_metadata(self.hub.hf_hub_url(self.repo, STEP))
            if not (answer.commit_hash and answer.etag):
                raise Unavailable(f"{self.repo}: no answer of a Hub")
            return answer.commit_hash, answer.etag
        except FileNotFoundError:
            with self.errors():
                return self.api.repo_info(self.repo).sha, ""

    def read(self, path: str, version=None):
        """One GET, whose answer names the commit and the hash."""
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
        try:
            with self.errors():
                url = self.hub.hf_hub_url(self.repo, path, revision=version)
                answer = get_session().get(url, headers=build_hf_headers())
                hf_raise_for_status(answer)
        except FileNotFoundError:
            version = version or self.head()[0]
            if any(path == there for there, _, _ in self.list(os.path.dirname(path), version)):
                raise Unavailable(f"{self.repo}: {path} is there and was not found") from None
            return version, None
        # a large file comes from elsewhere, and the first answer has what the Hub says of it
        first = next((a for a in [*answer.history, answer] if "X-Repo-Commit" in a.headers), None)
        if first is None:
            raise Unavailable(f"{self.repo}: no answer of a Hub")
        tag = first.headers.get("X-Linked-ETag") or first.headers.get("ETag", "")
        if not fits(answer.content, tag.removeprefix("W/").strip('"')):
            raise Unavailable(f"{self.repo}: {path} arrived damaged")
        return first.headers["X-Repo-Commit"], answer.content

    def fetch(self, path: str, version, to: Path, tag: str = ""):
        to.parent.mkdir(parents=True, exist_ok=True)
        # fresh: nothing stale, bounded disk
        with self.errors(), tempfile.TemporaryDirectory(dir=to.parent) as fresh:
            file = self.hub.hf_hub_download(self.repo, path, revision=version, local_dir=fresh)
            if tag and not fits(file, tag):
                raise Unavailable(f"{self.repo}: {path} arrived damaged")
            # keep: a new file, never new bytes in the old one, which tensors may be mapped from
            os.replace(file, to)

    def list(self, prefix: str, version=None):
        try:
            with self.errors():
                tree = list(self.api.list_repo_tree(self.repo, prefix.rstrip("/"), recursive=True,
                                                    revision=version))
        except FileNotFoundError:
            return []                           # no such folder yet
        return [(f.path, f.size, f.lfs.sha256 if f.lfs else f.blob_id)
                for f in tree if hasattr(f, "size")]

    def commit(self, add: dict, delete=(), expect=None, message="update") -> str:
        operations = [self.hub.CommitOperationAdd(
                          path, content if isinstance(content, bytes) else str(content))
                      # keep: made anew for each try, or a lost answer doubles it
                      for path, content in add.items()]
        twins = twins_of(add)
        first = [operation for operation in operations if operation.path_in_repo not in twins]
        operations += [self.hub.CommitOperationDelete(path, is_folder=False) for path in delete]
        try:
            with self.errors():
                if twins:       # once they are there, their twins need no upload
                    self.api.preupload_lfs_files(self.repo, first)
                return self.api.create_commit(self.repo, operations, commit_message=message,
                                              parent_commit=expect).oid
        except (Conflict, FileNotFoundError) as e:
            # the Hub may say 412 to overlapping commits that asked for no head, too
            if expect is None:
                raise Unavailable(str(e)) from e
            raise Conflict(str(e)) from e

    def squash(self):
        """Forget the history: overwritten weights stop counting against the quota."""
        with self.errors():
            self.api.super_squash_history(self.repo)


def poll_interval(settings: dict, transport, *loops: float) -> float:
    """Seconds between two looks: a tenth of the shortest inner loop, if not set."""
    return settings["poll_interval"] or min(30.0, max(transport.least_poll, min(loops, default=0.0)
                                                      / 10))


def open_hub(name: str, create=False, private=True):
    """The transport that --hub names: a folder (starts with . / or file://), or user/name on the
    Hub."""
    if name.startswith((".", "/", "file://")):
        return FolderTransport(name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return HubTransport(name, create, private)
    raise ValueError(f"distributed.hub={name}: wants a folder (./runs/hub) "
                     f"or a Hub repo (user/name)")

# ---- what is published


def parse_state(content: bytes) -> dict:
    """The published state. Raises Refused where it is none."""
    def like(values: dict, kinds: dict) -> bool:
        return all(isinstance(values[k], kind) for k, kind in kinds.items())
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        state, books = json.loads(content), MasterOuterLoop.new_books()
        # an older master kept no gaps
        state["nodes"] = {n: {"gaps": [], **entry} for n, entry in state["nodes"].items()}
        kinds = {k: (float, int, type(None)) if k == "loss" else (float, int)
                 if isinstance(v, float) else type(v) for k, v in books.items()}
        if (like(state, {"outer_step": int, "run_id": str, "progress": int, "nodes": dict,
                         "files": dict, "config": dict, "norms": list, "finished": bool})
                and all(like(state["files"][path], {"sha256": str, "size": int})
                        for path in (WEIGHTS, MOMENTUM, RESIDUAL, *state["files"]))
                and all(like(entry, kinds) for entry in state["nodes"].values())
                and all(like(r, {"number": int, "local_step": int, "reason": str})
                        for entry in state["nodes"].values() for r in entry["refused"])
                and all(isinstance(a + b, int)
                        for entry in state["nodes"].values() for a, b in entry["gaps"])
                and 0 <= state["outer_step"] < 10 ** 12 and 0 <= state["progress"] < 10 ** 15
                and 0 <= state.setdefault("momentum", 0.0) < 1
                and isinstance(state.setdefault("buffers", []), list)):
            return state
    raise Refused(f"{STEP} is not what a master of this program writes")


def rounds_of(history: bytes) -> list:
    """The lines of history.jsonl that are rounds."""
    rounds = []
    for line in history.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(line)
            if isinstance(line, dict) and line.keys() >= {"outer_step", "merged", "time"}:
                rounds.append(line)
    return rounds


def curves_of(rounds: list) -> dict:
    """{"train": [(step, loss)], "val": [(step, loss)]} of the global model, from the rounds."""
    curves, step = {"train": [], "val": []}, 0
    for line in rounds:
        losses = [m["loss"] for m in line["merged"]]
        step = max([step, *(m["local_step"] for m in line["merged"])])
        if losses:
            curves["train"].append((step, sum(losses) / len(losses)))
        if "val_loss" in line:
            curves["val"].append((step, line["val_loss"]))
    return curves


BEGIN = "<!-- swarm: from here to the closing mark the master writes; the rest is yours -->"
END = "<!-- swarm: end -->"


def page_of(old: str, settings: dict, state: dict, weights: dict, exported: bool) -> str:
    """README.md of the repository, a model card: `old` with the marked part made new, or a new one
    if it is empty."""
    c, hub, license = state["config"], settings["hub"], settings["license"]
    of = {section: c.get(section, {}) for section in ("run", "model", "data")}
    val = f", validation loss {state['val_loss']:.4f}" if "val_loss" in state else ""
    seen = {node: time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry["last_seen"]))
            for node, entry in state["nodes"].items()}
    part = "\n".join([
        BEGIN, f"A model of {sum(v.numel() for v in weights.values()):,} parameters "
        f"(`{of['model'].get('name')}`), trained on `{of['data'].get('path')}` by a swarm of "
        f"{len(state['nodes'])} node(s) that share what they learn through this repository.", "",
        f"**Outer step {state['outer_step']:,}, step {state['progress']:,} of "
        f"{of['run'].get('max_steps', 0):,}**, "
        f"{sum(entry['tokens'] for entry in state['nodes'].values()):,} tokens{val}.", "",
        f"![loss against steps]({CURVE})", "",
        "| node | steps merged | tokens | last seen (UTC) |", "|---|---|---|---|",
        *(f"| {node} | {entry['steps']:,} | {entry['tokens']:,} | {seen[node]} |"
          for node, entry in sorted(state["nodes"].items())), "",
        "To join, with a token in HF_TOKEN that may write here:", "", "```",
        f"python worker.py --hub={hub} --node-id=NAME", "```", END])
    if not old.strip():
        return "\n".join([
            "---", *([f"license: {license}"] if license else []), "pipeline_tag: text-generation",
            *(["library_name: transformers"] if exported else []),
            "tags:", "- text-generation", "- dumbdiloco", "- distributed-training", "---",
            f"# {hub.rstrip('/').split('/')[-1]}", "", part, ""])
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return before + part + after
    return f"{old.replace(BEGIN, '').rstrip()}\n\n{part}\n"


def read_state(transport, failed=say, stopped=lambda: False, version=None):
    """(version, state) of the global model, of `version` or else the newest; waits, saying so,
    while there is none. Raises Unavailable once stopped() holds."""
    said = False
    while not stopped():
        at, content = retry(lambda: transport.read(STEP, version), failed, stopped)
        if content is not None:
            return at, parse_state(content)
        if version is not None:     # forgotten by a squash
            version = None
            continue
        if not said:
            print("waiting  for a global model: is master.py running on this hub?", flush=True)
            said = True
        wait(2.0, stopped)
    raise Unavailable("stopped before there was a global model")


def read_global(transport, folder: Path, shapes: dict, base=None, wanted=lambda state: True,
                failed=say, stopped=lambda: False, version=None):
    """(state, weights) of the newest global model, of one version, checked by its hash; None if its
    state is not a wanted one. By way of the updates if `base`, the (state, weights) of an earlier
    one, is given and they are smaller. Raises Refused if its tensors have other shapes."""
    def fetch(path, at, state):
        transport.fetch(path, at, folder / "latest", state["files"][path]["sha256"])
        return folder / "latest"

    def attempt():
        nonlocal version
        at, state = read_state(transport, failed, stopped, version)
        version = None
        if not wanted(state):
            return None
        files = state["files"]
        try:
            if (base and base[0]["run_id"] == state["run_id"]
                    and state["outer_step"] - base[0]["outer_step"] <= UPDATES):
                updates = [UPDATE.format(n)
                           for n in range(base[0]["outer_step"] + 1, state["outer_step"] + 1)]
                if (files.keys() >= set(updates) and sum(files[path]["size"] for path in updates)
                        < files[WEIGHTS]["size"]):
                    weights = base[1]
                    for path in updates:
                        _, update = load_coded(fetch(path, at, state), shapes)
                        if not norm_of(update.values()) < math.inf:
                            raise ValueError(f"{path} holds numbers that are not finite")
                        weights = {k: v - update[k] for k, v in weights.items()}
                    return state, weights
            weights = load_file(fetch(WEIGHTS, at, state))
        except FileNotFoundError as e:
            raise Unavailable(f"the version that was read is gone: {e}") from e
        except (SafetensorError, KeyError, ValueError) as e:
            raise Refused(f"the global model cannot be read: {e}") from e
        if shapes_of(weights) != shapes:
            raise Refused("the global model of this hub has other tensors than this worker's model")
        return state, weights
    return retry(attempt, failed, stopped)


def workspace() -> tempfile.TemporaryDirectory:
    """A folder that goes when its process does; what killed processes have left goes now."""
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

# ---- the master


def check_delta(file, shapes: dict, limit: int) -> dict:
    """The header of a delta file, after every check that needs no tensor. Raises ValueError with
    the reason."""
    size = os.path.getsize(file)
    with open(file, "rb") as f:
        length = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))[0]
    if size < 8 or length > min(size - 8, limit):
        raise ValueError(f"no safetensors file: a header of {length:,} bytes in a file of {size:,}")
    try:
        with safe_open(file, "pt") as f:
            header, there = f.metadata() or {}, {k: f.get_slice(k) for k in f.keys()}
            there = {k: (v.get_dtype(), tuple(v.get_shape())) for k, v in there.items()}
    except (SafetensorError, OSError, ValueError) as e:
        raise ValueError(f"unreadable: {str(e).splitlines()[0]}") from None
    try:
        numbers = {k: int(header[k]) for k in ("local_step", "base_outer_step", "steps", "tokens")}
        numbers["first_step"] = int(header.get("first_step",
                                               numbers["local_step"] - numbers["steps"]))
        numbers["again"] = int(header.get("again", 0))
        floats = {"loss": float(header["loss"]), "seconds": float(header.get("seconds", 0))}
        strings = [header[k] for k in ("run_id", "node_id", "incarnation")]
        names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}
        expected = {k: (names[dtype], shape)
                    for k, (dtype, shape) in stored_shapes(shapes, header["codec"]).items()}
        if (not all(0 <= n < 10 ** 15 for n in numbers.values()) or max(map(len, strings)) > 99
                or not all(map(math.isfinite, floats.values()))):
            raise ValueError
    except (KeyError, ValueError):
        raise ValueError(f"the header lacks something: {sorted(header)[:20]}") from None
    if there != expected:
        k = next(k for k in sorted(there.keys() | expected) if there.get(k) != expected.get(k))
        raise ValueError(f"tensor {k[:80]} is {there.get(k, 'missing')}, "
                         f"not {expected.get(k, 'wanted')}")
    return {**header, **numbers, **floats}


class MasterOuterLoop:
    """Merges what the nodes send and publishes. All its state is in the repository: start it
    anywhere, with an empty disk, and it goes on bit for bit.

    settings: the section `distributed` of the config. weights, and `published` (what a worker shall
    know: "config", "buffers"), begin a repository that holds no model yet; of one that does,
    `published` is brought up to date. evaluate(weights, step) -> validation loss or None, if given,
    is called before each publication. files: {name: bytes} that make the repository a model of
    transformers. draw(curves) -> SVG text, if given, makes the picture of a page. Raises Refused
    when another master takes over.
    """

    def __init__(self, transport, settings: dict, weights: dict, published=None, evaluate=None,
                 files=None, draw=None, log=functools.partial(print, flush=True)):
        self.transport, self.settings, self.evaluate, self.log = transport, settings, evaluate, log
        self.files, self.draw, self.page_at = files or {}, draw, -math.inf
        self.optimizer = NesterovOuterOptimizer(settings["outer_lr"], settings["outer_momentum"],
                                                settings["outer_warmup"])
        self.work = workspace()
        self.folder = Path(self.work.name)
        self.stop = False
        self.first_seen = None          # when the first delta of the coming round was seen
        self.warned, self.started = set(), time.monotonic()
        self.lengths = deque(maxlen=5)  # of the last rounds, in inner loops
        self.listed, self.listing = None, []    # the version that was listed last
        self.own = []                   # tags of the states this master has published, newest last
        for attempt in range(5):
            try:
                return self.take_over(weights, published or {})
            except Superseded:          # a commit came between, of a master that has died, or that
                if attempt == 4:        # will stop when it sees ours
                    raise

    def patiently(self, work):
        def failed(error, retry_in):
            self.log(f"hub_error {error}; next try in {retry_in:.0f} s")
        return retry(work, failed, lambda: self.stop)

    def take_over(self, weights: dict, published: dict):
        """Load what is published, and commit: from then on the commit of any other master fails."""
        self.version, self.content = self.patiently(lambda: self.transport.read(STEP))
        if self.content is None:
            self.weights = {k: v.detach().float().cpu().clone() for k, v in weights.items()}
            self.momentum = {k: torch.zeros_like(v) for k, v in self.weights.items()}
            self.residual, self.history = {}, b""
            changed = {WEIGHTS: self.weights, MOMENTUM: self.momentum, RESIDUAL: self.residual}
            self.state = {"outer_step": 0, "run_id": os.urandom(8).hex(), "progress": 0,
                          "nodes": {}, "norms": [], "config": {}, "buffers": [], "files": {}}
        else:
            self.state, changed = parse_state(self.content), {}
            try:
                for path in (WEIGHTS, MOMENTUM, RESIDUAL):
                    self.patiently(lambda: self.fetch_own(path))
                self.weights, self.momentum, self.residual = (
                    load_file(self.folder / path) for path in (WEIGHTS, MOMENTUM, RESIDUAL))
            except FileNotFoundError as e:
                raise Superseded(f"the repository changed while it was read: {e}") from e
            if shapes_of(self.weights) != shapes_of(weights):
                raise Refused("the model on this hub is another one: leave the flags of the model "
                              "out, or use another --hub")
            self.history = self.patiently(
                lambda: self.transport.read(HISTORY, self.version))[1] or b""
        self.shapes = shapes_of(self.weights)
        self.header_limit = 1 << 20 | 400 * len(self.weights)       # bytes, of a delta
        self.commits = deque((line["time"] for line in rounds_of(self.history)), maxlen=1024)
        more = dict(self.files)
        if "config.json" in more and not changed:
            more[MODEL] = self.folder / WEIGHTS
        self.publish({**self.state, **published, "master": os.urandom(4).hex()}, changed,
                     self.history, more=more)
        self.log(f"master   at outer step {self.state['outer_step']} of run "
                 f"{self.state['run_id']}: waiting for deltas")

    def fetch_own(self, path: str):
        try:
            self.transport.fetch(path, self.version, self.folder / path,
                                 self.state["files"][path]["sha256"])
        except Unavailable:
            there = self.transport.read(STEP)[1]
            if there not in (None, self.content):
                raise Superseded("another master has published meanwhile") from None
            raise

    def page(self, state: dict, history: bytes) -> dict:
        """{path: bytes} of the page, if it is time for a new one: with the owner's words in it that
        are there now."""
        nodes = state["nodes"].values()
        over = state["finished"] or nodes and all(entry["final"] for entry in nodes)
        if not self.draw or time.monotonic() - self.page_at < PAGE_EVERY and not over:
            return {}
        old = (self.transport.read(PAGE, self.version)[1] or b"").decode(errors="replace")
        try:
            return {PAGE: page_of(old, self.settings, state, self.weights,
                                  "config.json" in self.files).encode(errors="replace"),
                    CURVE: self.draw(curves_of(rounds_of(history))).encode()}
        except Exception as e:      # numbers from nodes: no round stops for a picture of them
            self.log(f"notice   no new {PAGE}: {type(e).__name__} {e}")
            return {}

    def publish(self, state: dict, changed: dict, history: bytes, delete=(), more={}):
        """Put a new state out in one commit. Raises Refused if the one there is not the one this
        was made from."""
        add, files, delete = {HISTORY: history, **more}, dict(state["files"]), set(delete)
        for path, tensors in changed.items():
            add[path] = self.folder / path.replace("/", "_")
            files[path] = self.patiently(lambda: save(
                tensors, add[path], {"codec": self.settings["codec"], "format": "pt"}))
        if "config.json" in self.files and WEIGHTS in add:
            add[MODEL] = add[WEIGHTS]       # one file under two names
        old = UPDATE.format(state["outer_step"] - UPDATES)
        if files.pop(old, None):
            delete.add(old)
        state = {**state, "files": files, "momentum": self.optimizer.mu(state["outer_step"]),
                 "finished": 0 < self.settings["max_outer_steps"] <= state["outer_step"]}
        content = add[STEP] = json.dumps(state, indent=1).encode()

        paged = True

        def commit():
            nonlocal paged
            page = {}
            for pause in (0.0, 0.0, 0.2, 1.0, 5.0):
                try:
                    page = self.page(state, history) if paged else {}
                    self.version = self.transport.commit({**add, **page}, sorted(delete),
                                                         self.version,
                                                         f"outer step {state['outer_step']}")
                    self.page_at = time.monotonic() if page else self.page_at
                    return
                except Refused as e:
                    if not page:
                        raise
                    self.log(f"notice   {PAGE} stays as it is: {e}")
                    paged, self.page_at = False, time.monotonic()
                    continue
                # the head has moved, or an answer was lost: look first
                except (Conflict, Unavailable) as e:
                    doubt = e
                self.version, there = self.transport.read(STEP)
                if there == content:
                    return
                self.must_be_ours(there)
                if isinstance(doubt, Unavailable):
                    raise doubt
                # only deltas have come, or somebody has deleted one: once more, on the new head
                delete.intersection_update(
                    path for folder in ("nodes/", "global/")
                    for path, _, _ in self.transport.list(folder, self.version))
                wait(pause, lambda: self.stop)
            raise Unavailable("commits of others come faster than ours")
        self.patiently(commit)
        self.state, self.content, self.history = json.loads(content), content, history
        self.own = [*self.own, hashlib.sha256(content).hexdigest()][-8:]

    def must_be_ours(self, there):
        """Raises what it means if the state there is not the newest of ours."""
        if there == self.content:
            return
        if there is None:
            raise Unavailable(f"{STEP} is not there")
        if hashlib.sha256(there).hexdigest() in self.own[:-1]:          # a cache may lag behind
            raise Unavailable("the repository answers with an older version")
        raise Superseded(f"another master has taken the repository over; "
                         f"this one stops at outer step {self.state['outer_step']}")

    def waiting(self):
        """{node: [(local step, path, size, tag)]}, and the paths that are no delta's name. Raises
        Refused if another master has published."""
        def look():
            version, tag = self.transport.head()
            if not fits(self.content, tag):
                self.must_be_ours(self.transport.read(STEP, version)[1])
            if version != self.listed:
                self.listing = sorted(self.transport.list("nodes/", version))
                self.version = self.listed = version
        self.patiently(look)
        nodes, strange = {}, []
        for path, size, tag in self.listing:
            match = DELTA.fullmatch(path)
            if match and NODE_ID.fullmatch(match[1]):
                nodes.setdefault(match[1], []).append((int(match[2]), path, size, tag))
            else:
                strange.append(path)
        return {node: sorted(deltas) for node, deltas in nodes.items()}, strange

    def active(self) -> set:
        """Nodes that a round waits for."""
        return active_nodes(self.state["nodes"], self.state["outer_step"])

    def due(self, nodes) -> bool:
        """Whether the round closes now: all are there, or the quorum is, or it has waited long
        enough."""
        if not nodes:
            self.first_seen = None
            return False
        if self.first_seen is None:
            self.first_seen = time.monotonic()
        if not may_commit(self.settings, self.transport, self.state["nodes"], self.commits,
                          time.time()):
            return False
        return (set() < self.active() <= nodes or 0 < self.settings["quorum"] <= len(nodes)
                or time.monotonic() - self.first_seen > self.round_timeout())

    def loops(self) -> list:
        """Seconds of an inner loop of each active node, shortest first."""
        return sorted(self.state["nodes"][node]["seconds"] for node in self.active())

    def round_timeout(self) -> float:
        """Seconds that a round waits after its first delta; while no node is known, a tenth of the
        time that one took to come, at most one, for those who began at the same time."""
        if not self.active():
            return min(1.0, (self.first_seen - self.started) / 10)
        return self.settings["round_timeout"] or 2 * statistics.median(self.loops())

    def sync_once(self) -> int:
        """One outer round over the deltas that are there now. Returns the outer step; without
        deltas nothing happens.

        Raises Refused if another master has published since.
        """
        began = time.monotonic()
        nodes, strange = self.waiting()
        books = {node: dict(entry) for node, entry in self.state["nodes"].items()}
        total = {k: torch.zeros_like(v) for k, v in self.weights.items()}
        merged, delete = [], list(strange)
        refused = [{"path": path, "reason": "not the name of a delta"} for path in strange]
        # fixed order, nodes by name and each by step: the order of arrival cannot change a bit
        for node, local_step, path, file in self.fetched(
                [(node, *delta) for node in sorted(nodes) for delta in nodes[node]]):
            try:
                merged.append(self.add_delta(total, node, local_step, file.result(), books))
            except FileNotFoundError:       # gone since it was listed
                continue
            except ValueError as e:
                reason = "".join(c if c.isprintable() else "?" for c in str(e)[:200])
                refused.append({"path": path, "reason": reason})
                entry = books.setdefault(node, self.new_books())
                entry["refusals"] += 1
                entry["refused"] = [*entry["refused"][-19:],
                                    {"number": entry["refusals"], "local_step": local_step,
                                     "reason": reason}]
            delete.append(path)
        if not delete:
            return self.state["outer_step"]

        contributors = {m["node"] for m in merged}
        outer_step = self.state["outer_step"] + bool(merged)
        for node in contributors:
            books[node]["outer_step"] = outer_step
        state = {**self.state, "outer_step": outer_step, "nodes": books,
                 "progress": max([self.state["progress"], *(m["local_step"] for m in merged)]),
                 "norms": [*self.state["norms"], *(m["norm"] for m in merged)][-64:]}
        line = {"event": "round", "outer_step": outer_step, "merged": merged, "refused": refused}
        changed, weights = {}, self.weights
        if merged:
            # those who have finished count: else a slow node's last steps, without the others' to
            # average out their noise, would move the model as far as all together did
            among = len(contributors | members(books, outer_step))
            weights, momentum, residual, update = self.outer_step(total, among, len(contributors))
            changed = {WEIGHTS: weights, MOMENTUM: momentum, RESIDUAL: residual}
            if self.settings["codec"] != "fp32":        # which is not smaller than the model
                changed[UPDATE.format(outer_step)] = update
            line["norm"] = norm_of(weights[k] - self.weights[k] for k in weights)
            val_loss = self.evaluate(weights, state["progress"]) if self.evaluate else None
            if val_loss is not None:
                line["val_loss"] = state["val_loss"] = val_loss
        line |= {"bytes_in": sum(m.pop("bytes") for m in merged),
                 "bytes_out": sum(v.nbytes for t in changed.values() for v in t.values()),
                 "seconds": time.monotonic() - began, "time": time.time()}
        self.publish(state, changed, self.history + json.dumps(line).encode() + b"\n", delete)
        self.commits.append(line["time"])
        if merged:
            self.weights, self.momentum, self.residual = weights, momentum, residual
            self.warn(line)
        self.first_seen = None
        self.report(line)
        if (merged and self.settings["squash_every"]
                and outer_step % self.settings["squash_every"] == 0):
            try:
                self.transport.squash()
            except (Conflict, Unavailable, Refused, FileNotFoundError) as e:    # the next one may
                self.log(f"notice   the history could not be squashed: {e.args[0]}")
        return outer_step

    @staticmethod
    def new_books() -> dict:
        return {"incarnation": "", "local_step": 0, "steps": 0, "lost": 0, "gaps": [], "tokens": 0,
                "loss": None, "outer_step": 0, "base_outer_step": 0, "seconds": 0.0,
                "final": False, "last_seen": 0.0, "refusals": 0, "refused": []}

    def fetched(self, deltas: list):
        """Yields (node, local step, path, future of the file) of each, eight ahead: over the Hub a
        fetch is two requests, which may take seconds."""
        with ThreadPoolExecutor(8) as pool:
            ahead = deque()
            for node, local_step, *what in deltas:
                ahead.append((node, local_step, what[0], pool.submit(self.fetch_delta, *what)))
                if len(ahead) == 8:
                    yield ahead.popleft()
            yield from ahead

    def fetch_delta(self, path: str, size: int, tag: str) -> Path:
        """The file, here. Raises ValueError if it is too large for a delta."""
        if size > 4 * sum(v.numel() for v in self.weights.values()) + self.header_limit:
            raise ValueError(f"{size:,} bytes, more than this model can need")
        file = self.folder / path.replace("/", "_")
        self.patiently(lambda: self.transport.fetch(path, self.version, file, tag))
        return file

    def add_delta(self, total, node, local_step, file, books) -> dict:
        """Check all that can be checked of a delta, book it and add it to the total of tensors; the
        file goes. What history.jsonl says of it. Raises ValueError with the reason to refuse it."""
        size = file.stat().st_size
        try:
            d = check_delta(file, self.shapes, self.header_limit)
            _, delta = load_coded(file, self.shapes)
        finally:
            file.unlink()
        entry = books.setdefault(node, self.new_books())
        if d["run_id"] != self.state["run_id"]:
            raise ValueError(f"of another run, {d['run_id'][:40]}")
        if d["node_id"] != node or d["local_step"] != local_step:
            raise ValueError(f"its header says {d['node_id'][:64]} at step {d['local_step']}")
        if d["base_outer_step"] > self.state["outer_step"]:
            raise ValueError(f"based on outer step {d['base_outer_step']}, which does not exist")
        if d["incarnation"] < entry["incarnation"]:
            entry["lost"] += d["steps"]
            raise ValueError("of a worker whose node id another worker has taken over")
        before = d["first_step"]
        if d["incarnation"] == entry["incarnation"]:
            before = entry["local_step"]
            if local_step <= before:
                raise ValueError(f"a replay: step {before} is merged already")
        else:
            entry["gaps"] = []
        gap = local_step - d["steps"] - before
        if gap < 0:
            entry["lost"] += local_step - before
            entry |= {"incarnation": d["incarnation"], "local_step": local_step}
            raise ValueError(f"of {d['steps']} steps, {-gap} of which are not new")
        if gap:     # what was sent in between did not come, or was bad; the node may send it again
            entry["lost"] += gap
            entry["gaps"] = [*entry["gaps"][-19:], [before, before + gap]]
        # From here on the node's work is booked: as merged, or as lost.
        entry |= {"incarnation": d["incarnation"], "local_step": local_step, "loss": d["loss"],
                  "seconds": d["seconds"], "final": d.get("final") == "True",
                  "last_seen": time.time(), "base_outer_step": d["base_outer_step"]}
        stale = self.state["outer_step"] - d["base_outer_step"]
        scale = (1 + stale) ** -self.settings["staleness_power"]
        norm, lost = norm_of(delta.values()), None
        if self.settings["max_staleness"] and stale > self.settings["max_staleness"]:
            lost = f"{stale} outer steps old, more than max_staleness"
        if not norm < math.inf:
            lost = "it holds numbers that are not finite"
        if lost:
            entry["lost"] += d["steps"]
            raise ValueError(lost)
        ratio, norms = self.settings["max_norm_ratio"], self.state["norms"]
        if ratio and len(norms) >= 4:           # an outsized delta is scaled down, not refused
            scale *= min(1.0, ratio * statistics.median(norms) / max(norm, 1e-30))
        for k, g in total.items():
            g.add_(delta[k], alpha=scale)
        again = min(d["again"], entry["lost"])      # reported lost, and in this delta
        entry["lost"] -= again
        entry["steps"] += d["steps"] + again
        entry["tokens"] += d["tokens"]
        return {"node": node, **{k: d[k] for k in ("local_step", "base_outer_step", "tokens",
                                                   "loss")},
                "steps": d["steps"] + again, "norm": norm * scale, "bytes": size}

    def outer_step(self, total: dict, among: int, contributors: int):
        """New (weights, momentum, residual) and the coded update, from the sum of all deltas. The
        weights move by exactly what the update says; what its rounding keeps back is in the
        residual, and goes out with the next one."""
        change, momentum, codec = {}, {}, self.settings["codec"]
        for k, weight in self.weights.items():
            kept = self.residual[k].float() if k in self.residual else torch.zeros_like(weight)
            if k in self.state["buffers"]:
                change[k], momentum[k] = kept + total[k] / contributors, self.momentum[k]
            else:
                moved, momentum[k] = self.optimizer.step(
                    -kept, self.momentum[k], total[k] / among, contributors / among,
                    self.state["outer_step"])
                change[k] = -moved
        update = encode(change, codec)
        said = decode(update, self.shapes, codec)
        return ({k: v - said[k] for k, v in self.weights.items()}, momentum,
                {k: (v - said[k]).bfloat16() for k, v in change.items()
                 if form(v.shape, codec) != torch.float32}, update)

    def report(self, line: dict):
        for r in line["refused"]:
            self.log(f"refused  {r['path']}: {r['reason']}")
        nodes = sorted({m["node"] for m in line["merged"]})
        if nodes:
            val = f" | val {line['val_loss']:.4f}" if "val_loss" in line else ""
            known = len(self.active().union(nodes))
            self.log(f"round    {line['outer_step']:4d} | nodes {len(nodes)}/{known} "
                     f"{','.join(nodes)[:40]} | norm {line['norm']:.3f}{val} | "
                     f"{line['bytes_in'] / 1e6:.1f} MB in | "
                     f"{line['bytes_out'] / 1e6:.1f} MB out | {line['seconds']:.1f} s")

    def warn(self, line: dict):
        """Say once what is known to go badly, and the setting that helps."""
        s, books, steps = self.settings, self.state["nodes"], Counter()
        ages = [line["outer_step"] - 1 - m["base_outer_step"] for m in line["merged"]]
        tokens = {node: entry["tokens"] for node, entry in books.items()}
        most = max(tokens, key=tokens.get)
        for m in line["merged"]:
            steps[m["node"]] += m["steps"]
        self.lengths.append(statistics.median(steps.values()) / s["inner_steps"])
        loops = statistics.median(self.lengths)
        for kind, holds, text in (
                ("short", s["inner_steps"] <= 10 and s["outer_momentum"] >= 0.9,
                 f"an outer momentum of {s['outer_momentum']} over inner loops of "
                 f"{s['inner_steps']} steps overshoots: raise --inner-steps, or lower "
                 f"--outer-momentum to 0.6"),
                ("stale", statistics.median(ages) >= 3,
                 "deltas come three and more rounds late: raise --inner-steps, so that an inner "
                 "loop is longer than an upload and a download"),
                ("long", loops >= 4 and len(self.lengths) == self.lengths.maxlen,
                 f"a round takes {loops:.0f} inner loops: raise --inner-steps to "
                 f"{s['inner_steps'] * loops:.0f}"),
                ("large", len(books) > 2 and tokens[most] > sum(tokens.values()) / 2,
                 f"node {most} trains more than half of all tokens, and counts as one of "
                 f"{len(books)}: raise --target-batch-size there")):
            if holds and kind not in self.warned:
                self.warned.add(kind)
                self.log(f"notice   {text}")

    def run(self):
        """Round after round, until `stop` is set or max_outer_steps is reached. An idle poll is one
        HEAD."""
        try:
            while not self.stop and not self.state["finished"]:
                nodes, strange = self.waiting()
                if self.due(set(nodes)) or strange and not nodes:
                    self.sync_once()
                wait(poll_interval(self.settings, self.transport, *self.loops()),
                     lambda: self.stop)
        except Unavailable:     # only once `stop` is set
            self.log("notice   the repository is not reachable now; what waits there is merged "
                     "when a master starts again")


def shapes_of(tensors: dict) -> dict:
    return {k: tuple(v.shape) for k, v in tensors.items()}


def active_nodes(books: dict, outer_step: int) -> set:
    """Nodes that are at work, as far as the books know."""
    return {node for node, entry in books.items()
            if entry["outer_step"] >= max(1, outer_step + 1 - ACTIVE_ROUNDS) and not entry["final"]}


def members(books: dict, outer_step: int) -> set:
    """Nodes among which a round is averaged: those at work, and those who have finished and are
    still ahead of them."""
    active = active_nodes(books, outer_step)
    front = max((books[node]["local_step"] for node in active), default=0)
    return active | {node for node, entry in books.items()
                     if entry["final"] and entry["local_step"] >= front}


def may_commit(settings: dict, transport, books: dict, times, now: float, last=False) -> bool:
    """Whether a node, or the master, that has committed at these times may do so now, so that all
    together stay below commits_per_hour. Everybody seen in the last two hours has an equal share,
    and one is kept for a node that joins. The first half of it is free; then the gaps grow until
    they last; for a `last` commit there need be none."""
    limit = settings["commits_per_hour"]
    if not transport.limited or not limit:
        return True
    newest = max((entry["last_seen"] for entry in books.values()), default=0.0)
    nodes = sum(entry["last_seen"] > newest - 7200 and not entry["final"]
                for entry in books.values())
    share, window = limit / (nodes + 2), 3600.0
    if share < 1:
        share, window = 1.0, window / share
    share = int(share)
    times = [t for t in times if now - window < t <= now]     # not those of a clock that was ahead
    gap = 0.0 if last else window / share * 2 * (2 * len(times) / share - 1)
    return len(times) < share and (not times or now - times[-1] >= gap)


def norm_of(tensors) -> float:
    """Euclidean norm over all tensors, to six digits: the last bits may differ by machine."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v) for v in tensors]))
    return float(f"{norm.item():.6g}")


def status(transport, rows: int = 20) -> str:
    """The nodes of a swarm, and the loss in about `rows` of its outer steps, as a table. It only
    reads. Raises Refused if there is no swarm."""
    version, content = retry(lambda: transport.read(STEP))
    if content is None:
        raise Refused("there is no global model on this hub yet")
    state = parse_state(content)
    history = retry(lambda: transport.read(HISTORY, version))[1] or b""
    found = retry(lambda: transport.list("nodes/"))
    waiting = Counter(match[1] for path, _, _ in found if (match := DELTA.fullmatch(path)))
    lines = [f"run {state['run_id']} | outer step {state['outer_step']} | step {state['progress']} "
             f"| {len(state['nodes'])} nodes | {waiting.total()} deltas waiting", "",
             f"{'node':<16} {'last seen':>10} {'at step':>8} {'merged':>8} {'lost':>6} "
             f"{'waiting':>7} {'tokens':>13} {'loss':>7} {'stale':>5} {'refused':>7}"]
    for node in sorted(state["nodes"].keys() | waiting):
        b = state["nodes"].get(node, MasterOuterLoop.new_books())
        seen = f"{time.time() - b['last_seen']:,.0f} s" if b["last_seen"] else "never"
        loss = "-" if b["loss"] is None else f"{b['loss']:.4f}"
        lines.append(f"{node:<16} {seen:>10} {b['local_step']:>8} {b['steps']:>8} {b['lost']:>6} "
                     f"{waiting[node]:>7} {b['tokens']:>13,} {loss:>7} "
                     f"{state['outer_step'] - b['base_outer_step']:>5} {b['refusals']:>7}")
        if b["refused"]:
            lines.append(f"  last refused: step {b['refused'][-1]['local_step']}, "
                         f"{b['refused'][-1]['reason']}")
    rounds = [line for line in rounds_of(history) if line["merged"]]
    if rounds:
        lines += ["", f"{'outer step':>10} {'train loss':>10} {'val loss':>8} {'norm':>8}  nodes"]
    for r in [r for i, r in enumerate(rounds)
              if (len(rounds) - 1 - i) % math.ceil(len(rounds) / rows) == 0]:
        losses, nodes = [m["loss"] for m in r["merged"]], sorted({m["node"] for m in r["merged"]})
        val = f"{r['val_loss']:.4f}" if "val_loss" in r else "-"
        lines.append(f"{r['outer_step']:>10} {sum(losses) / len(losses):>10.4f} {val:>8} "
                     f"{r['norm']:>8.3f}  {','.join(nodes)[:40]}")
    return "\n".join(lines)

# ---- the worker


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


class DumbDiLoCo:
    """The worker side: the Trainer's coordinator.

    Its invariant, in tensors of the model's shapes:
        weights  = G - sent, not merged - unsent           G: the global model installed last
        baseline = G - sent, not merged                    so weights = baseline - unsent
    While something is on its way both are `ahead` as well: where the outer momentum will have
    carried G until that is merged (the point from which Nesterov's gradient is taken, seen from
    here). Where that was wrong, the weights stay behind, and what is left is unsent work.
    Two background threads do all input and output, one up and one down. Training waits for them
    only at the start, at the end, and at each boundary with settings["wait"]. Trouble that does not
    pass ends the training with its state saved, and is in `failed`.
    """

    def __init__(self, transport, node_id: str, settings: dict):
        if not NODE_ID.fullmatch(node_id):
            raise ValueError(f"distributed.node_id={node_id!r}: write --node-id=NAME, up to 64 "
                             f"letters, digits, dots, dashes, underscores")
        self.transport, self.node_id, self.settings = transport, node_id, settings
        self.incarnation = f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        self.work = workspace()
        self.folder = Path(self.work.name)
        self.state, self.baseline = None, {}    # the state is that of G
        self.saved = None               # the state of a checkpoint, to be reconciled in start()
        self.first_step = 0             # the local step at which this node joined
        self.ramp = False               # whether that was in the middle of a run
        self.pushes = deque(maxlen=1024)         # when the last deltas were sent
        self.sent = {}                  # {local step: (decoded delta, steps, tokens)}, not in G
        self.again = (0, 0)             # (steps, tokens) that were lost, and are unsent again
        self.sending = None             # the delta on its way: {"local_step", "delta", ...}
        self.done, self.failed = None, None     # results of the background thread
        self.arrived = None             # (state, weights) of a newer global model
        self.errors = deque()           # what the background thread has met, to be told
        self.seen = None                # tag of the published state looked at last
        self.closing = self.warned = False
        self.loop = 0.0                 # seconds between the last two deltas
        self.velocity, self.ahead = {}, False   # of G per round; whether the weights are ahead of G
        self.wake, self.coding = threading.Condition(), threading.Condition()

    # what a checkpoint holds

    def state_dict(self) -> dict:
        if not self.state:
            return self.saved
        return {"incarnation": self.incarnation, "baseline": self.baseline,
                "last_sent": self.last_sent, "tokens_sent": self.tokens_sent,
                "first_step": self.first_step, "outer_step": self.state["outer_step"],
                "run_id": self.state["run_id"],
                "sending": self.sending and {k: v for k, v in self.coded(self.sending).items()
                                             if k in ("local_step", "delta")}}

    def load_state_dict(self, state: dict):
        self.saved = state

    # called by the Trainer

    def start(self, trainer):
        def failed(error, retry_in):
            self.met(error, retry_in)
            self.tell(trainer)

        def stopped():
            return bool(trainer.stop_signal)
        self.tensors = swarm_tensors(trainer.model)
        self.shapes = shapes_of(self.tensors)
        try:
            while True:
                # what waits is listed first: what the master merges meanwhile is in the state
                listed = retry(lambda: self.transport.list(f"nodes/{self.node_id}/"), failed,
                               stopped)
                waiting = {int(match[2]): (path, tag) for path, _, tag in listed
                           if (match := DELTA.fullmatch(path))}
                self.state, new = read_global(self.transport, self.folder, self.shapes,
                                              failed=failed, stopped=stopped)
                try:
                    self.join(trainer, new, waiting, failed, stopped)
                    break
                except FileNotFoundError:       # merged just now
                    continue
        except Unavailable:     # only once the trainer was told to stop
            self.state = None
            return
        trainer.emit("join", f"{trainer.progress()} | {self.node_id} joined "
                     f"at outer step {self.state['outer_step']}",
                     outer_step=self.state["outer_step"], step=trainer.step)
        self.pushed = time.monotonic()
        self.begin()

    def join(self, trainer, new: dict, waiting: dict, failed, stopped):
        books = self.state["nodes"].get(self.node_id, {})
        self.refusals = books.get("refusals", 0)
        if self.saved and self.saved["run_id"] == self.state["run_id"]:
            self.reconcile(trainer, new, waiting, failed, stopped)
            return
        if self.saved:
            print("notice   the checkpoint is of another run of this hub: joining as a new node",
                  flush=True)
        if books.get("incarnation", "") >= self.incarnation:    # of a clock that was ahead
            number = int(re.match(r"\d{,30}", books["incarnation"])[0] or 0)
            self.incarnation = f"{number + 1:020d}-{os.urandom(4).hex()}"
        self.rebase(new, {k: torch.zeros_like(v) for k, v in new.items()})
        # beyond what waits there of an earlier worker of this name: nothing is overwritten
        trainer.step = max([self.state["progress"], books.get("local_step", 0), *waiting])
        trainer.position = trainer.step * trainer.config["data"]["target_batch_size"]
        self.last_sent = self.first_step = trainer.step
        self.tokens_sent, self.ramp = trainer.tokens, trainer.step > 0

    def reconcile(self, trainer, new: dict, waiting: dict, failed, stopped):
        """After a restart: what the hub has of this incarnation, waiting or merged, is not trained
        again."""
        saved, self.incarnation = self.saved, self.saved["incarnation"]
        self.first_step = saved["first_step"]
        self.own_books(self.state)
        merged = self.merged_step(self.state)
        self.sent, file = {}, self.folder / "own"
        for step, (path, tag) in sorted(waiting.items()):
            if step > merged:
                retry(lambda: self.transport.fetch(path, None, file, tag), failed, stopped)
                incarnation, work = self.read_delta(file)
                if incarnation > self.incarnation:
                    self.taken_over()
                if incarnation == self.incarnation:
                    self.sent[step] = work
        known = max([merged, saved["last_sent"], *self.sent])
        unsent = self.unsent(saved["baseline"])
        sending, tokens_sent = saved["sending"], saved["tokens_sent"]
        if known > trainer.step:                            # sent after the checkpoint was written
            unsent = {k: torch.zeros_like(v) for k, v in unsent.items()}
            trainer.step = known
            trainer.position = known * trainer.config["data"]["target_batch_size"]
            tokens_sent = trainer.tokens
        # on its way when it was written, and it has arrived
        elif sending and known >= sending["local_step"]:
            unsent = {k: v - sending["delta"][k] for k, v in unsent.items()}
        self.last_sent, self.tokens_sent = known, tokens_sent
        self.rebase(new, unsent)

    def schedule_step(self, step: int) -> float:
        """The step whose learning rate counts: the mean of all nodes as far as the books know, but
        for those not half as far as the first, and this node's steps since. So all decay together,
        with the tokens of the swarm, however fast each is."""
        books, mine = self.state["nodes"], self.merged_step(self.state)
        if not mine:
            return step
        others = members(books, self.state["outer_step"]) - {self.node_id}
        steps = [mine, *(books[node]["local_step"] for node in others)]
        return step - mine + statistics.mean(s for s in steps if 2 * s >= max(steps))

    def lr_scale(self, step: int) -> float:
        """A node that has joined a running swarm has cold Adam moments: it takes small steps
        first."""
        if not self.ramp:
            return 1.0
        return min(1.0, (step + 1 - self.first_step) / max(1, self.settings["join_warmup"]))

    def after_step(self, trainer):
        self.take_results(trainer)
        if trainer.step % self.settings["inner_steps"] == 0:
            self.push(trainer)
            if self.settings["wait"]:
                self.wait_for_round(trainer)

    def finish(self, trainer):
        """At the end of training: send the rest, and wait until it has arrived."""
        if not self.state:
            return
        began, said = time.monotonic(), False
        while (self.sending or self.last_sent < trainer.step) and not trainer.stop_signal:
            self.take_results(trainer)
            if not self.sending and self.last_sent < trainer.step:
                self.push(trainer, last=True)
            if not said and time.monotonic() - began > 5:
                print("waiting  for the upload of the last delta; Ctrl-C leaves it to the next "
                      "start", flush=True)
                said = True
            # a commit limit may make it wait for its turn
            wait(0.02 if self.sending else 2.0, lambda: trainer.stop_signal)
        with self.wake:
            self.closing = True
            self.wake.notify()
        for thread in self.threads:
            thread.join(timeout=10)
        self.take_results(trainer)
        if self.ahead:          # what is evaluated and saved now is not
            self.velocity = {}
            self.rebase(self.G, self.unsent(self.baseline))

    # the steps of the algorithm

    def taken_over(self):
        raise Refused(f"another worker has taken over the node id {self.node_id}; "
                      f"use another --node-id")

    def read_delta(self, file):
        """(incarnation, (tensors, steps, tokens)) of a delta; ("", None) if it is none, whoever has
        put it there."""
        try:
            header, delta = load_coded(file, self.shapes)
            steps = int(header["steps"]) + int(header.get("again", 0))
            return header["incarnation"], (delta, steps, int(header["tokens"]))
        except (ValueError, KeyError):
            return "", None

    def own_books(self, state: dict) -> dict:
        """What the master has booked of this node. Raises Refused if another worker has its id."""
        books = state["nodes"].get(self.node_id, {})
        if books.get("incarnation", "") > self.incarnation:
            self.taken_over()
        return books

    def unsent(self, baseline: dict) -> dict:
        return {k: baseline[k] - v.detach().float().cpu() for k, v in self.tensors.items()}

    def rebase(self, new: dict, unsent: dict, stay: float = 0.0):
        """Move to G = new: the baseline without what was sent and is not in G, and the weights, but
        for a part `stay` of the way, which becomes unsent work."""
        before, self.baseline = self.baseline, {k: v.clone() for k, v in new.items()}
        self.G, self.ahead = new, False
        for delta, _, _ in self.sent.values():
            for k in delta:
                self.baseline[k] -= delta[k]
        if stay:
            unsent = {k: v + stay * (self.baseline[k] - before[k]) for k, v in unsent.items()}
        self.look_ahead()
        set_tensors(self.tensors, {k: self.baseline[k] - unsent[k] for k in unsent})

    def look_ahead(self):
        """While something is on its way, the baseline is where G will be when it is merged."""
        mu = self.state["momentum"]
        if (self.sent or self.sending) and mu and self.velocity and not self.ahead:
            self.ahead = True
            for k, v in self.velocity.items():
                self.baseline[k] -= mu ** 2 * v     # the next step, but for its g

    def follow(self, new: dict, rounds: int):
        """The velocity, outer_lr * buf, from how far G has moved: a round with all nodes moves it
        by u = outer_lr * (g + mu * buf), and g = buf - mu * (buf before)."""
        mu = self.state["momentum"]
        if mu and rounds > 0 and not self.settings["wait"]:     # that, round after round
            kept = (mu / (1 + mu)) ** rounds
            self.velocity = {k: kept * self.velocity.get(k, 0.0)
                             + (1 - kept) * (self.G[k] - new[k]) / rounds
                             for k in new if k not in self.state["buffers"]}

    def push(self, trainer, last=False):
        """Hand baseline - weights to the background thread, unless one is on its way or the master
        has not merged."""
        if self.sending or self.last_sent == trainer.step:
            return
        if not last and len(self.sent) >= self.settings["max_pending"]:
            if not self.warned:
                print(f"waiting  {len(self.sent)} deltas are not merged yet: is master.py running? "
                      f"Training goes on, the next delta holds it all", flush=True)
            self.warned = True
            return
        now = time.monotonic()
        if self.crowded(now, last):
            return
        self.loop, self.pushed = now - self.pushed, now
        self.pushes.append(now)
        delta = self.unsent(self.baseline)
        if not all(v.isfinite().all() for v in delta.values()):
            return self.fail(trainer, Refused(f"the weights are not finite at step {trainer.step}: "
                                              f"nothing was sent"))
        header = {"run_id": self.state["run_id"], "node_id": self.node_id,
                  "incarnation": self.incarnation, "local_step": trainer.step,
                  "base_outer_step": self.state["outer_step"],
                  "steps": trainer.step - self.last_sent, "first_step": self.first_step,
                  "tokens": trainer.tokens - self.tokens_sent + self.again[1],
                  "again": self.again[0],
                  "loss": float(trainer.last_loss), "seconds": self.loop,
                  "final": last or trainer.step >= trainer.config["run"]["max_steps"],
                  "codec": self.settings["codec"]}
        path = f"nodes/{self.node_id}/delta_{trainer.step}.safetensors"
        with self.wake:
            self.sending = {"local_step": trainer.step, "exact": delta, "path": path,
                            "header": {k: str(v) for k, v in header.items()},
                            "tokens": trainer.tokens, "again": self.again,
                            "began": time.monotonic()}
            self.wake.notify()
        if not self.ahead:
            self.look_ahead()
            if self.ahead:
                set_tensors(self.tensors, {k: self.baseline[k] - v for k, v in delta.items()})

    def coded(self, sending: dict) -> dict:
        """`sending` with what is stored of it and what readers make of that, instead of the exact
        delta: by the background thread, or by the training thread if it needs it before."""
        with self.coding:
            if "exact" in sending:
                sending["stored"] = encode(sending["exact"], self.settings["codec"])
                sending["delta"] = decode(sending["stored"], self.shapes, self.settings["codec"])
                del sending["exact"]
        return sending

    def crowded(self, now: float, last: bool) -> bool:
        """Whether a commit now would be more than this node's share. How many share is known once
        the master has booked this node: its second delta waits for that."""
        books = self.state["nodes"]
        booked = books.get(self.node_id, {}).get("incarnation") == self.incarnation
        if self.pushes and not booked and self.transport.limited and not last:
            return self.settings["commits_per_hour"] > 0
        return not may_commit(self.settings, self.transport, books, self.pushes, now, last)

    def fail(self, trainer, error: Exception):
        self.failed, trainer.stop_signal = error, type(error).__name__

    def tell(self, trainer):
        while self.errors:
            error, retry_in = self.errors.popleft()
            trainer.emit("hub_error", f"{error}; next try in {retry_in:.0f} s", error=error,
                         retry_in=retry_in)

    def take_results(self, trainer):
        """What the background thread has done since the last step."""
        self.tell(trainer)
        if self.failed:
            return self.fail(trainer, self.failed)
        sending, arrived = self.sending, self.arrived
        with self.wake:
            done = self.done
            if arrived and sending and self.covers(arrived[0], sending["local_step"]):
                done = done or sending  # it is in the new global before its own answer has come
            if done:
                self.done = self.sending = None
        if done:
            for k, v in self.coded(done)["delta"].items():
                self.baseline[k] -= v
            steps, header = done["local_step"] - self.last_sent, done["header"]
            self.sent[done["local_step"]] = (done["delta"], steps + done["again"][0],
                                             int(header["tokens"]))
            self.again = tuple(a - b for a, b in zip(self.again, done["again"]))
            self.last_sent, self.tokens_sent = done["local_step"], done["tokens"]
            size, seconds = done.get("size", 0), time.monotonic() - done["began"]
            trainer.emit("push", f"{trainer.progress()} | {steps} steps | {size / 1e6:.1f} MB | "
                         f"{seconds:.1f} s",
                         step=done["local_step"],
                         base_outer_step=int(header["base_outer_step"]),
                         steps=steps, bytes=size, seconds=seconds)
        if arrived:
            self.install(trainer, *arrived)
            self.arrived = None     # keep: last, because the other thread looks again from then on

    def refused(self, state: dict) -> dict:
        """{local step: reason} of what the master has refused of this worker since it came."""
        books = state["nodes"].get(self.node_id, {})
        return {r["local_step"]: r["reason"] for r in books.get("refused", ())
                if r["number"] > self.refusals}

    def merged_step(self, state: dict) -> int:
        """The local step up to which `state` holds the work of this incarnation."""
        books = state["nodes"].get(self.node_id, {})
        return books["local_step"] if books.get("incarnation") == self.incarnation else 0

    def lost(self, state: dict) -> set:
        """The steps of those of `sent` that the master has missed when it merged a later one: it
        takes them no more, so they can go out again with the next delta."""
        books = state["nodes"].get(self.node_id, {})
        gaps = books["gaps"] if books.get("incarnation") == self.incarnation else ()
        return {step for step in self.sent if any(a < step <= b for a, b in gaps)}

    def covers(self, state: dict, local_step: int) -> bool:
        """Whether `state` has merged, or refused, this node's delta of that step."""
        return self.merged_step(state) >= local_step or local_step in self.refused(state)

    def install(self, trainer, state: dict, new: dict):
        """Move to a newer global model, keeping the work it does not hold."""
        began = time.monotonic()
        try:
            books = self.own_books(state)
        except Refused as e:
            return self.fail(trainer, e)
        refused, lost = self.refused(state), self.lost(state)
        for local_step, reason in refused.items():
            trainer.emit("refused", f"{trainer.progress()} | the delta of step {local_step}: "
                         f"{reason}", step=local_step, reason=reason)
        unsent = self.unsent(self.baseline)
        merged = self.merged_step(state)
        if merged > self.last_sent:     # an upload of this worker's process before has landed late:
            unsent = (self.coded(self.sending)["delta"] if self.sending else    # it did these steps
                      {k: torch.zeros_like(v) for k, v in unsent.items()})
            trainer.step = self.last_sent = max(merged, trainer.step)
        for step in [step for step in self.sent if step <= merged or step in refused]:
            delta, *counts = self.sent.pop(step)
            if step in refused or step in lost:     # the global model will never hold it
                self.baseline = {k: v + delta[k] for k, v in self.baseline.items()}
            if step in lost and step not in refused:
                unsent = {k: v + delta[k] for k, v in unsent.items()}
                self.again = tuple(map(sum, zip(self.again, counts)))
        rounds, stay = state["outer_step"] - self.state["outer_step"], 0.0
        if self.ahead and rounds == 1:
            # The steps since the last delta began where G was expected to be now. Of that error
            # they have undone what is steep, and would do it once more after the whole way; what is
            # flat cancels among the nodes. Half a loop is enough for what is steep. Early in a run
            # long loops take the nodes far apart: there to follow matters more, and the part grows
            # with the outer momentum.
            h = self.settings["inner_steps"]
            stay = (STAY * min(1.0, max(SHORT / h, state["momentum"]))
                    * min(1.0, 2 * (trainer.step - self.last_sent) / h))
        self.follow(new, rounds)
        self.state, self.refusals, self.warned = state, books.get("refusals", 0), False
        self.rebase(new, unsent, stay)
        trainer.emit("install", f"{trainer.progress()} | outer step {state['outer_step']}",
                     step=trainer.step, outer_step=state["outer_step"],
                     seconds=time.monotonic() - began)

    def wait_for_round(self, trainer):
        """The synchronous algorithm: go on when the round with this node's work is published."""
        while ((self.sending or self.sent) and not trainer.stop_signal
               and not self.state.get("finished")):
            self.take_results(trainer)
            time.sleep(0.02)

    # the background threads

    def begin(self):
        self.threads = [threading.Thread(target=self.background, args=(once,), daemon=True)
                        for once in (self.upload_once, self.look_once)]
        for thread in self.threads:
            thread.start()

    def background(self, once):
        try:
            while not self.closing:
                once()
        except Exception as e:  # told to the training thread, which ends the run with it
            if not self.closing:
                self.failed = e

    def met(self, error: str, retry_in: float):
        self.errors.append((error, retry_in))

    def patiently(self, work):
        return retry(work, self.met, lambda: self.closing)

    def upload_once(self):
        with self.wake:
            self.wake.wait_for(lambda: self.closing or self.sending and not self.done)
            sending = self.sending
        if not self.closing:
            done = self.upload(sending)
            with self.wake:
                if self.sending is sending:     # else it was seen in a global model already
                    self.done = done

    def look_once(self):
        """Fetch the global model if there is a newer one. An idle look is one HEAD."""
        version, tag = self.patiently(self.transport.head)
        if tag != self.seen and not self.arrived:
            self.look(version)
            self.seen = tag
        wait(poll_interval(self.settings, self.transport, self.loop), lambda: self.closing)

    def look(self, version=None):
        """Fetch the global model if it is a newer one, or refuses something of ours."""
        def wanted(state):
            if state["run_id"] != self.state["run_id"]:
                raise Refused("this hub holds another run now; start the worker again to join it")
            return (state["outer_step"] > self.state["outer_step"] or self.refused(state)
                    or state["finished"] != self.state["finished"])
        self.arrived = read_global(
            self.transport, self.folder, self.shapes, (self.state, self.G), wanted,
            self.met, lambda: self.closing, version)

    def upload(self, sending: dict) -> dict:
        file, there = self.folder / "upload", self.folder / "own"
        self.coded(sending)
        saved = self.patiently(lambda: save(sending["stored"], file, sending["header"]))
        result, tried = {**sending, "size": saved["size"]}, False

        def attempt():
            nonlocal tried
            found = {path: tag for path, _, tag
                     in self.transport.list(f"nodes/{self.node_id}/")}
            if sending["path"] in found:
                try:
                    self.transport.fetch(sending["path"], None, there, found[sending["path"]])
                except FileNotFoundError as e:      # merged just now
                    raise Unavailable(str(e)) from e
                incarnation, work = self.read_delta(there)
                if incarnation > self.incarnation:
                    self.taken_over()
                if incarnation < self.incarnation:
                    raise Unavailable(f"{sending['path']} is not ours: the master removes it")
                return {**result, "delta": work[0]}     # what counts is what is there
            if tried:           # its answer was lost: it may have been merged, too
                state = parse_state(self.transport.read(STEP)[1] or b"")
                self.own_books(state)
                if self.covers(state, sending["local_step"]):
                    return result
            tried = True
            self.transport.commit({sending["path"]: file},
                                  message=f"{self.node_id} step {sending['local_step']}")
            return result
        return self.patiently(attempt)
