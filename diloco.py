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
     not hold yet.
Sign, once for all: delta = before - after, so the global model moves by MINUS the averaged delta.

  global/latest.safetensors                         the global model, fp32
  global/step_count.json                            outer step, hashes, books
  global/momentum.safetensors                       outer momentum, fp32
  global/history.jsonl                              a line per outer round
  nodes/<node_id>/delta_<local_step>.safetensors    waiting to be merged

Trust: whoever may write to the repository may move the model; what a master can check (shapes, run,
replays, numbers that are none, outsized norms) it does. It does not authenticate nodes, hide data
or keep a fast network busy.
"""
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import statistics
import struct
import tempfile
import threading
import time
from pathlib import Path, PurePosixPath

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

STEP, WEIGHTS = "global/step_count.json", "global/latest.safetensors"
MOMENTUM, HISTORY = "global/momentum.safetensors", "global/history.jsonl"
NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DELTA = re.compile(r"nodes/([^/]+)/delta_(\d{1,18})\.safetensors")
ACTIVE_ROUNDS = 4       # a node that has contributed to none of this many rounds is not waited for


class Conflict(Exception):
    """The repository has moved since the version a commit was computed from."""


class Unavailable(Exception):
    """The repository cannot be reached now; a commit may or may not have been made. Arguments:
    what, and the seconds to wait that it asked for, if it did."""


class Refused(Exception):
    """Trying again will not help: no rights, no such repository, taken over by another."""

# ---- codecs: how a delta is written
# Matrices in the codec's form; vectors, and what is smaller than a block, in fp32.

BLOCK = 64
CODECS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def stored_dtype(shape, codec: str) -> torch.dtype:
    small = len(shape) < 2 or torch.Size(shape).numel() < BLOCK
    return torch.float32 if small else CODECS[codec]


def encode(delta: dict, codec: str) -> dict:
    return {k: v.to(stored_dtype(v.shape, codec)).contiguous() for k, v in delta.items()}


def decode(stored: dict) -> dict:
    """What every reader makes of a stored delta: exact, the same on each machine."""
    return {k: v.float() for k, v in stored.items()}

# ---- the outer optimizer: no files, no network


class NesterovOuterOptimizer:
    """Outer step over named tensors, with a part f = n / K of the active nodes contributing.

        mu  = momentum * min(1, (outer_step + 1) / warmup)     warmup 0: constant
        buf = mu**f * buf + g
        W  -= lr * (g + f * mu * buf)

    With f = 1 and no warmup this is torch.optim.SGD(momentum=mu, nesterov=True). Floating buffers
    of the model (BatchNorm statistics) take the plain average instead.
    """

    def __init__(self, lr: float, momentum: float, warmup: int = 0):
        self.lr, self.momentum, self.warmup = lr, momentum, warmup

    def step(self, weight, buf, g, f: float, outer_step: int):
        """New (weight, buf) of one tensor; the arguments stay as they are."""
        mu = self.momentum * (min(1.0, (outer_step + 1) / self.warmup) if self.warmup else 1.0)
        buf = mu ** f * buf + g
        return weight - self.lr * (g + f * mu * buf), buf

# ---- patience


def wait(seconds: float, stopped):
    """Sleep, with jitter so that nodes do not march in step, waking up early when stopped()
    holds."""
    end = time.monotonic() + seconds * random.uniform(0.8, 1.2)
    while time.monotonic() < end and not stopped():
        time.sleep(min(0.1, max(0.0, end - time.monotonic())))


def retry(work, log, stopped, longest: float = 300.0):
    """work(), again and again while the repository is unavailable: 1 s, 2 s, ... up to `longest`
    between tries.

    Returns None when stopped() holds. What does not pass (Refused) is raised at once.
    """
    pause = 1.0
    while True:
        try:
            return work()
        except Unavailable as e:
            if stopped():
                raise
            asked = e.args[1] if len(e.args) > 1 else 0.0
            log(f"hub      {e.args[0]}; next try in {max(pause, asked):.0f} s")
            wait(max(pause, asked), stopped)
            pause = min(longest, pause * 2)

# ---- transports
# head() -> version; list(prefix) -> (version, [(path, size)]); snapshot(paths, folder) -> (version,
# {path: file}), all of one version, missing ones left out; commit(add, delete, expect) -> version,
# all or nothing, Conflict if `expect` is given and is not the head.


def sha256(path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


class FolderTransport:
    """The repository as a plain folder: one machine, or a shared file system with working locks.

    A commit stages its files, then writes a redo log: from that rename on it is made, and whoever
    takes the lock next finishes it. A kill at any moment leaves the old state or the new one.
    """

    def __init__(self, root):
        self.root = Path(str(root).removeprefix("file://"))
        self.own = self.root / ".hub"
        self.own.mkdir(parents=True, exist_ok=True)
        self.log, self.version_file = self.own / "redo.json", self.own / "version"
        self.lock = FileLock(self.own / "lock")

    def head(self) -> str:
        if self.log.exists():
            with self.locked():
                pass
        return self.version_file.read_text() if self.version_file.exists() else "0"

    @contextlib.contextmanager
    def locked(self):
        try:
            with self.lock.acquire(timeout=60):
                if self.log.exists():
                    self.redo(json.loads(self.log.read_text()))
                yield
        except OSError as e:  # a full disk, a network drive that is away; a lock not had in time
            raise Unavailable(f"{self.root}: {e}") from e

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

    def list(self, prefix: str):
        with self.locked():
            found = [(f.relative_to(self.root).as_posix(), f.stat().st_size)
                     for f in sorted((self.root / prefix).rglob("*")) if f.is_file()]
            return self.head(), found

    def snapshot(self, paths, folder: Path):
        with contextlib.ExitStack() as stack:
            # opened under the lock, copied after it: a commit replaces files, never writes in them
            with self.locked():
                version, sources = self.head(), {}
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):
                        sources[path] = stack.enter_context(open(self.root / path, "rb"))
            for path, source in sources.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                with open(folder / "part", "wb") as f:
                    shutil.copyfileobj(source, f, 1 << 20)
                # keep: a new file, never new bytes in the old one, which tensors may still be
                # mapped from
                os.replace(folder / "part", folder / path)
        return version, {path: folder / path for path in sources}

    def commit(self, add: dict, delete=(), expect=None, message="") -> str:
        """add: {path: bytes or a file}."""
        for path in [*add, *delete]:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise Refused(f"{path} is no path in the repository")
        with self.locked():
            head = self.head()
            if expect is not None and head != expect:
                raise Conflict(f"{self.root} is at {head}, not {expect}")
            staged = {path: f"staged_{i}" for i, path in enumerate(add)}
            try:
                for path, content in add.items():
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
        if create:
            with self.errors():
                self.api.create_repo(repo, private=private, exist_ok=True)

    @contextlib.contextmanager
    def errors(self):
        """What can pass is Unavailable, what cannot is Refused, a moved head is a Conflict."""
        errors = self.hub.errors
        try:
            yield
        except errors.HFValidationError as e:
            raise Refused(f"--hub={self.repo}: {e}") from e
        except (self.net_error, OSError, RuntimeError) as e:  # RuntimeError: an upload that failed
            while not isinstance(e, errors.HfHubHTTPError) and e.__cause__:
                e = e.__cause__
            raise self.meaning(e) from e

    def meaning(self, e) -> Exception:
        errors, response = self.hub.errors, getattr(e, "response", None)
        said = " ".join((getattr(e, "server_message", None) or str(e)).split())[:200]
        if response is None:
            return Unavailable(f"{self.repo}: {type(e).__name__} {said}")
        status, after = response.status_code, response.headers.get("Retry-After", "")
        said = f"{self.repo}: {status} {said}"
        if status == 412:
            return Conflict(said)
        # a squashed commit, a file that is gone: look again
        gone = isinstance(e, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError))
        if status in (400, 401, 402, 403, 404, 413, 422) and not gone:
            return Refused(said + ("" if status == 400 else "; is HF_TOKEN set, and may it write?"))
        return Unavailable(said, float(after) if after.isdigit()
                           else 60.0 if status == 429 else 0.0)

    def head(self) -> str:
        """One HEAD, on a path whose answer names the newest commit."""
        with self.errors():
            try:
                return self.hub.get_hf_file_metadata(
                    self.hub.hf_hub_url(self.repo, STEP)).commit_hash
            except self.hub.errors.RemoteEntryNotFoundError:
                return self.api.repo_info(self.repo).sha

    def list(self, prefix: str):
        version = self.head()
        with self.errors():
            try:
                tree = list(self.api.list_repo_tree(self.repo, prefix.rstrip("/"), recursive=True,
                                                    revision=version))
            except self.hub.errors.RemoteEntryNotFoundError:
                tree = []           # no such folder yet
            return version, [(f.path, f.size) for f in tree if hasattr(f, "size")]

    def snapshot(self, paths, folder: Path):
        version, found = self.head(), {}
        folder.mkdir(parents=True, exist_ok=True)
        # fresh: nothing stale, bounded disk
        with self.errors(), tempfile.TemporaryDirectory(dir=folder) as fresh:
            for info in self.api.get_paths_info(self.repo, list(paths), revision=version):
                file = Path(self.hub.hf_hub_download(self.repo, info.path, revision=version,
                                                     local_dir=fresh))
                if info.lfs:
                    whole = sha256(file) == info.lfs.sha256
                else:
                    data = file.read_bytes()
                    whole = (hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                             == info.blob_id)
                if not whole:
                    raise Unavailable(f"{self.repo}: {info.path} arrived damaged")
                found[info.path] = folder / info.path
                found[info.path].parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, found[info.path])
        return version, found

    def commit(self, add: dict, delete=(), expect=None, message="update") -> str:
        operations = [self.hub.CommitOperationAdd(
                          path, content if isinstance(content, bytes) else str(content))
                      # keep: made anew for each try, or a lost answer doubles it
                      for path, content in add.items()]
        operations += [self.hub.CommitOperationDelete(path, is_folder=False) for path in delete]
        try:
            with self.errors():
                return self.api.create_commit(self.repo, operations, commit_message=message,
                                              parent_commit=expect).oid
        except Conflict as e:   # the Hub may say so to overlapping commits that asked for no head
            if expect is None:
                raise Unavailable(str(e)) from e
            raise

    def squash(self):
        """Forget the history: overwritten weights stop counting against the quota."""
        with self.errors():
            self.api.super_squash_history(self.repo)


def open_hub(name: str, create=False, private=True):
    """The transport that --hub names: a folder (starts with . / or file://), or user/name on the
    Hub."""
    if name.startswith((".", "/", "file://")):
        return FolderTransport(name)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return HubTransport(name, create, private)
    raise ValueError(f"distributed.hub={name}: wants a folder (./runs/hub) "
                     f"or a Hub repo (user/name)")

# ---- the master


def check_delta(path, expected: dict, limit: int) -> dict:
    """The header of a delta file, after every check that needs no tensor. Raises ValueError with
    the reason."""
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        length = struct.unpack("<Q", f.read(8).ljust(8, b"\0"))[0]
    if size < 8 or length > min(size - 8, limit):
        raise ValueError(f"no safetensors file: a header of {length:,} bytes in a file of {size:,}")
    try:
        with safe_open(path, "pt") as f:
            header = f.metadata() or {}
            shapes = {k: tuple(f.get_slice(k).get_shape()) for k in f.keys()}
    except (SafetensorError, OSError, ValueError) as e:
        raise ValueError(f"unreadable: {str(e).splitlines()[0]}") from None
    if shapes != expected:
        k = next(k for k in sorted(shapes.keys() | expected) if shapes.get(k) != expected.get(k))
        raise ValueError(f"tensor {k[:80]} is {shapes.get(k, 'missing')}, "
                         f"not {expected.get(k, 'wanted')}")
    try:
        numbers = {k: int(header[k]) for k in ("local_step", "base_outer_step", "steps", "tokens")}
        if min(numbers.values()) < 0 or header["codec"] not in CODECS:
            raise ValueError
        return {**header, **numbers, "loss": float(header["loss"])}
    except (KeyError, ValueError):
        raise ValueError(f"the header lacks something: {sorted(header)}") from None


class MasterOuterLoop:
    """Merges what the nodes send and publishes. All its state is in the repository: start it
    anywhere, with an empty disk, and it goes on bit for bit.

    settings: the section `distributed` of the config. weights, and `published` (what a worker shall
    know: "config", "buffers"), are used only where the repository holds no model yet.
    evaluate(weights) -> validation loss, if given, is called before each publication. Raises
    Refused when another master takes over.
    """

    def __init__(self, transport, settings: dict, weights=None, published=None, evaluate=None,
                 log=print):
        self.transport, self.settings, self.evaluate, self.log = transport, settings, evaluate, log
        self.optimizer = NesterovOuterOptimizer(settings["outer_lr"], settings["outer_momentum"],
                                                settings["outer_warmup"])
        self.work = tempfile.TemporaryDirectory(prefix="diloco_")
        self.folder = Path(self.work.name)
        self.stop = False
        self.first_seen = None          # when the first delta of the coming round was seen
        self.version, files = self.read(STEP, WEIGHTS, MOMENTUM, HISTORY)
        # the published state, as it stands there
        self.content = files[STEP].read_bytes() if STEP in files else None
        if self.content:
            self.state = json.loads(self.content)
            for path, meta in self.state["files"].items():
                if path not in files or sha256(files[path]) != meta["sha256"]:
                    raise Refused(f"{path} is not what {STEP} says: the repository is damaged")
            self.weights, self.momentum = load_file(files[WEIGHTS]), load_file(files[MOMENTUM])
            self.history = files[HISTORY].read_bytes()
            changed = {}
        elif weights is None:
            raise Refused("the repository holds no global model yet")
        else:
            self.weights = {k: v.detach().float().cpu().clone() for k, v in weights.items()}
            self.momentum = {k: torch.zeros_like(v) for k, v in self.weights.items()}
            self.history = b""
            self.state = {"outer_step": 0, "run_id": os.urandom(8).hex(), "nodes": {}, "norms": [],
                          "progress": 0, **(published or {}), "files": {}}
            changed = {WEIGHTS: self.weights, MOMENTUM: self.momentum}
        # Take the repository: from here on the commit of any other master fails, and that one
        # stops.
        self.publish({**self.state, "master": os.urandom(4).hex()}, changed, self.history)

    def read(self, *paths):
        return retry(lambda: self.transport.snapshot(paths, self.folder), self.log,
                     lambda: self.stop)

    def publish(self, state: dict, changed: dict, history: bytes, delete=()):
        """Put a new state out in one commit. Raises Refused if the one there is not the one this
        was made from."""
        add, files = {HISTORY: history}, dict(state["files"])
        for path, tensors in changed.items():
            add[path] = self.folder / path.replace("/", "_")
            save_file(tensors, add[path])
            files[path] = {"sha256": sha256(add[path]), "size": add[path].stat().st_size}
        content = add[STEP] = json.dumps({**state, "files": files}, indent=1).encode()

        def commit():
            while True:
                try:
                    self.version = self.transport.commit(add, delete, self.version,
                                                         f"outer step {state['outer_step']}")
                    return
                # the head has moved, or an answer was lost: look first
                except (Conflict, Unavailable) as e:
                    doubt = e
                self.version, there = self.transport.snapshot([STEP], self.folder)
                there = there[STEP].read_bytes() if STEP in there else None
                if there == content:
                    return
                self.must_be_ours(there)
                if isinstance(doubt, Unavailable):
                    raise doubt
                # only deltas have come: once more, on the new head
        retry(commit, self.log, lambda: False)
        self.state, self.content, self.history = json.loads(content), content, history

    def must_be_ours(self, there):
        if there != self.content:
            raise Refused(f"another master has taken the repository over; "
                          f"this one stops at outer step {self.state['outer_step']}")

    def waiting(self):
        """(version, {node: [(local step, path, size)]}, [(path, reason)] of what is no delta's
        name)."""
        version, found = retry(lambda: self.transport.list("nodes/"), self.log, lambda: self.stop)
        nodes, strange = {}, []
        for path, size in found:
            match = DELTA.fullmatch(path)
            if match and NODE_ID.fullmatch(match[1]):
                nodes.setdefault(match[1], []).append((int(match[2]), path, size))
            else:
                strange.append((path, "not the name of a delta"))
        return version, {node: sorted(nodes[node]) for node in sorted(nodes)}, strange

    def active(self) -> set:
        """Nodes that a round waits for."""
        last = self.state["outer_step"] + 1 - ACTIVE_ROUNDS
        return {node for node, books in self.state["nodes"].items()
                if books["outer_step"] >= max(1, last)}

    def due(self, nodes) -> bool:
        """Whether the round closes now: all are there, or the quorum is, or it has waited long
        enough."""
        if not nodes:
            self.first_seen = None
            return False
        if self.first_seen is None:
            self.first_seen = time.monotonic()
        return (self.active() <= nodes or 0 < self.settings["quorum"] <= len(nodes)
                or time.monotonic() - self.first_seen > self.settings["round_timeout"])

    def sync_once(self) -> int:
        """One outer round over the deltas that are there now. Returns the outer step; without
        deltas nothing happens.

        Raises Refused if another master has published since.
        """
        began = time.monotonic()
        self.version, nodes, strange = self.waiting()
        _, files = self.read(STEP)
        self.must_be_ours(files[STEP].read_bytes() if STEP in files else None)
        deltas, refused, delete = [], [], []
        books = {node: dict(entry) for node, entry in self.state["nodes"].items()}
        for path, reason in strange:
            refused.append({"path": path, "reason": reason})
            delete.append(path)
        for node, waiting in nodes.items():
            for local_step, path, size in waiting:
                try:
                    delta = self.examine(node, local_step, path, size, books)
                except FileNotFoundError:
                    continue                    # gone since it was listed
                except ValueError as e:
                    refused.append({"path": path, "reason": str(e)})
                    entry = books.setdefault(node, self.new_books())
                    entry["refused"] = [*entry["refused"],
                                        {"local_step": local_step, "reason": str(e)}][-20:]
                    entry["refusals"] += 1
                else:
                    deltas.append(delta)
                delete.append(path)
        if not delete:
            return self.state["outer_step"]

        merged = {d["node"] for d in deltas}
        outer_step = self.state["outer_step"] + bool(merged)
        for node in merged:
            books[node]["outer_step"] = outer_step
        state = {**self.state, "outer_step": outer_step, "nodes": books,
                 "progress": max([self.state["progress"], *(d["local_step"] for d in deltas)]),
                 "norms": [*self.state["norms"], *(d["norm"] for d in deltas)][-64:]}
        line = {"event": "round", "outer_step": outer_step, "refused": refused,
                "bytes_in": sum(d["size"] for d in deltas),
                "merged": [{k: d[k] for k in ("node", "local_step", "base_outer_step", "steps",
                                              "tokens", "norm", "loss")}
                           for d in deltas]}
        changed, weights, momentum = {}, self.weights, self.momentum
        if merged:
            active = len({n for n in books if books[n]["outer_step"] > outer_step - ACTIVE_ROUNDS})
            weights, momentum, line["norm"] = self.merge(deltas, active, len(merged))
            changed = {WEIGHTS: weights, MOMENTUM: momentum}
            if self.evaluate:
                line["val_loss"] = state["val_loss"] = self.evaluate(weights)
        line["bytes_out"] = sum(v.numel() * 4 for t in changed.values() for v in t.values())
        line["seconds"] = time.monotonic() - began
        line["time"] = time.time()
        self.publish(state, changed, self.history + json.dumps(line).encode() + b"\n", delete)
        self.weights, self.momentum, self.first_seen = weights, momentum, None
        self.report(line)
        for d in deltas:
            d["file"].unlink()
        if (merged and self.settings["squash_every"]
                and outer_step % self.settings["squash_every"] == 0):
            retry(self.transport.squash, self.log, lambda: self.stop)
        return outer_step

    @staticmethod
    def new_books() -> dict:
        return {"incarnation": "", "local_step": 0, "steps": 0, "lost": 0, "tokens": 0,
                "loss": None, "outer_step": 0, "base_outer_step": 0, "last_seen": 0.0,
                "refusals": 0, "refused": []}

    def examine(self, node, local_step, path, size, books) -> dict:
        """Fetch a delta, check all that can be checked and book it. Raises ValueError with the
        reason to refuse it."""
        model = sum(v.numel() for v in self.weights.values())
        header_limit = 1 << 20 | 400 * len(self.weights)
        if size > 4 * model + header_limit:
            raise ValueError(f"{size:,} bytes, more than this model can need")
        _, files = self.read(path)
        if path not in files:
            raise FileNotFoundError(path)
        file = files[path]
        d = check_delta(file, {k: tuple(v.shape) for k, v in self.weights.items()}, header_limit)
        entry = books.setdefault(node, self.new_books())
        if d["run_id"] != self.state["run_id"]:
            raise ValueError(f"of another run, {d['run_id'][:40]}")
        if d["node_id"] != node or d["local_step"] != local_step:
            raise ValueError(f"its header says {d['node_id'][:64]} at step {d['local_step']}")
        if d["incarnation"] < entry["incarnation"]:
            raise ValueError("of a worker whose node id another worker has taken over")
        if d["incarnation"] == entry["incarnation"] and local_step <= entry["local_step"]:
            raise ValueError(f"a replay: step {entry['local_step']} is merged already")
        if d["base_outer_step"] > self.state["outer_step"]:
            raise ValueError(f"based on outer step {d['base_outer_step']}, which does not exist")
        # From here on the node's work is booked: as merged, or as lost.
        if d["incarnation"] == entry["incarnation"]:    # what it sent in between was refused unread
            entry["lost"] += max(0, local_step - d["steps"] - entry["local_step"])
        lost = None
        stale = self.state["outer_step"] - d["base_outer_step"]
        if self.settings["max_staleness"] and stale > self.settings["max_staleness"]:
            lost = f"{stale} outer steps old, more than max_staleness"
        with safe_open(file, "pt") as f:
            norms = [torch.linalg.vector_norm(decode({k: f.get_tensor(k)})[k])
                     for k in self.weights]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item()
        if not norm < float("inf"):
            lost = "it holds numbers that are not finite"
        entry |= {"incarnation": d["incarnation"], "local_step": local_step, "loss": d["loss"],
                  "last_seen": time.time(), "base_outer_step": d["base_outer_step"]}
        if lost:
            entry["lost"] += d["steps"]
            raise ValueError(lost)
        entry["steps"] += d["steps"]
        entry["tokens"] += d["tokens"]
        scale = (1 + stale) ** -self.settings["staleness_power"]
        ratio = self.settings["max_norm_ratio"]
        if ratio and len(self.state["norms"]) >= 4:  # an outsized delta is scaled down, not refused
            scale *= min(1.0, ratio * statistics.median(self.state["norms"]) / max(norm, 1e-30))
        kept = file.rename(self.folder / f"{node}_{local_step}.delta")
        return {**d, "node": node, "norm": norm * scale, "scale": scale, "size": size, "file": kept}

    def merge(self, deltas, active: int, contributors: int):
        """New (weights, momentum, norm of the step), a tensor at a time: memory does not grow with
        the deltas.

        Fixed order, nodes by name and each by step, so the order of arrival cannot change a bit.
        """
        f_round, outer_step = contributors / active, self.state["outer_step"]
        weights, momentum, norms = {}, {}, []
        for name, weight in self.weights.items():
            g = torch.zeros_like(weight)
            for d in deltas:
                # opened for each tensor: nothing stays mapped
                with safe_open(d["file"], "pt") as f:
                    g.add_(decode({name: f.get_tensor(name)})[name], alpha=d["scale"])
            if name in self.state.get("buffers", ()):
                weights[name], momentum[name] = weight - g / contributors, self.momentum[name]
            else:
                weights[name], momentum[name] = self.optimizer.step(
                    weight, self.momentum[name], g / active, f_round, outer_step)
            norms.append(torch.linalg.vector_norm(weights[name] - weight))
        return weights, momentum, torch.linalg.vector_norm(torch.stack(norms)).item()

    def report(self, line: dict):
        for r in line["refused"]:
            self.log(f"refused  {r['path']}: {r['reason']}")
        nodes = sorted({m["node"] for m in line["merged"]})
        if nodes:
            val = f" | val {line['val_loss']:.4f}" if "val_loss" in line else ""
            self.log(f"round    {line['outer_step']:4d} | nodes {len(nodes)}/{len(self.active())} "
                     f"{','.join(nodes)[:40]} | "
                     f"norm {line['norm']:.3f}{val} | {line['bytes_in'] / 1e6:.1f} MB in | "
                     f"{line['bytes_out'] / 1e6:.1f} MB out | {line['seconds']:.1f} s")

    def run(self):
        """Round after round, until `stop` is set or max_outer_steps is reached."""
        seen = None
        while not self.stop and not (
                0 < self.settings["max_outer_steps"] <= self.state["outer_step"]):
            head = retry(self.transport.head, self.log, lambda: self.stop)
            if head != seen or self.first_seen:
                _, nodes, strange = self.waiting()
                if self.due(set(nodes)) or strange:
                    self.sync_once()
                seen = head
            wait(self.settings["poll_interval"], lambda: self.stop)

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


def read_published(transport, folder: Path, log=print, stopped=lambda: False):
    """(state, weights file) of the newest global model, checked; waits, saying so, while there is
    none."""
    said = False
    while not stopped():
        _, files = retry(lambda: transport.snapshot([STEP, WEIGHTS], folder), log, stopped)
        if STEP in files:
            state = json.loads(files[STEP].read_bytes())
            if WEIGHTS in files and sha256(files[WEIGHTS]) == state["files"][WEIGHTS]["sha256"]:
                return state, files[WEIGHTS]
            log("hub      the weights do not fit their hash; reading again")
        elif not said:
            log("waiting  for a global model: is master.py running on this hub?")
            said = True
        wait(2.0, stopped)
    raise Refused("stopped before there was a global model")


class DumbDiLoCo:
    """The worker side: the Trainer's coordinator.

    Its invariant, in tensors of the model's shapes:
        weights  = G - sent, not merged - unsent           G: the global model installed last
        baseline = G - sent, not merged                    so weights = baseline - unsent
    A background thread does all input and output. Training waits for it only at the start, at the
    end, and at each boundary with settings["wait"].
    """

    def __init__(self, transport, node_id: str, settings: dict, log=print):
        if not NODE_ID.fullmatch(node_id):
            raise ValueError(f"distributed.node_id={node_id!r}: wants letters, digits, dot, dash, "
                             f"underscore; at most 64")
        self.transport, self.node_id, self.settings, self.log = transport, node_id, settings, log
        self.incarnation = f"{time.time_ns():020d}-{os.urandom(4).hex()}"
        self.work = tempfile.TemporaryDirectory(prefix="diloco_")
        self.folder = Path(self.work.name)
        self.saved = None               # the state of a checkpoint, to be reconciled in start()
        self.sent = []                  # [(local step, decoded delta)], uploaded and not in G
        self.sending = None             # the delta on its way: {"local_step", "delta", ...}
        self.done, self.failed = None, None     # results of the background thread
        self.arrived = None             # (state, weights) of a newer global model
        self.closing = False
        self.wake = threading.Condition()

    # what a checkpoint holds

    def state_dict(self) -> dict:
        return {"incarnation": self.incarnation, "baseline": self.baseline,
                "last_sent": self.last_sent, "tokens_sent": self.tokens_sent,
                "outer_step": self.state["outer_step"], "run_id": self.state["run_id"],
                "sending": self.sending and {k: self.sending[k] for k in ("local_step", "delta")}}

    def load_state_dict(self, state: dict):
        self.saved = state

    # called by the Trainer

    def start(self, trainer):
        def stopped():
            return bool(trainer.stop_signal)
        self.state, file = read_published(self.transport, self.folder, self.log, stopped)
        new = load_file(file)
        self.tensors = swarm_tensors(trainer.model)
        ours = {k: tuple(v.shape) for k, v in self.tensors.items()}
        if ours != {k: tuple(v.shape) for k, v in new.items()}:
            raise Refused("the global model of this hub has other tensors than this worker's model")
        if self.saved and self.saved["run_id"] == self.state["run_id"]:
            self.reconcile(trainer, new)
        else:
            if self.saved:
                self.log("notice   the checkpoint is of another run of this hub: "
                         "joining as a new node")
            self.baseline = new
            set_tensors(self.tensors, new)
            trainer.step = (max(trainer.step, self.state["progress"]) if not self.saved
                            else self.state["progress"])
            trainer.position = trainer.step * trainer.config["data"]["target_batch_size"]
            self.last_sent, self.tokens_sent = trainer.step, trainer.tokens
        self.joined = trainer.step
        trainer.emit("join", f"{trainer.progress()} | {self.node_id} joined "
                     f"at outer step {self.state['outer_step']}",
                     outer_step=self.state["outer_step"], step=trainer.step)
        self.thread = threading.Thread(target=self.exchange, daemon=True)
        self.thread.start()

    def reconcile(self, trainer, new: dict):
        """After a restart: what the hub has of this incarnation, waiting or merged, is not trained
        again."""
        saved, self.incarnation = self.saved, self.saved["incarnation"]
        books = self.own_books(self.state)
        merged = books["local_step"] if books.get("incarnation") == self.incarnation else 0
        waiting = []
        _, found = retry(lambda: self.transport.list(f"nodes/{self.node_id}/"), self.log,
                         lambda: False)
        for path, _ in found:
            match = DELTA.fullmatch(path)
            if match and int(match[2]) > merged:
                _, files = retry(lambda: self.transport.snapshot([path], self.folder), self.log,
                                 lambda: False)
                with contextlib.suppress(SafetensorError, KeyError, ValueError):
                    with safe_open(files[path], "pt") as f:
                        if f.metadata()["incarnation"] == self.incarnation:
                            waiting.append((int(match[2]),
                                            decode({k: f.get_tensor(k) for k in f.keys()})))
        self.sent = sorted(waiting, key=lambda item: item[0])
        known = max([merged, saved["last_sent"], *(step for step, _ in self.sent)])
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

    def lr_scale(self, step: int) -> float:
        """A node that has just joined has cold Adam moments: it takes small steps first."""
        return min(1.0, (step + 1 - self.joined) / max(1, self.settings["join_warmup"]))

    def after_step(self, trainer):
        self.take_results(trainer)
        if trainer.step % self.settings["inner_steps"] == 0:
            self.push(trainer)
            if self.settings["wait"]:
                self.wait_for_round(trainer)

    def finish(self, trainer):
        """At the end of training: send the rest, and wait until it has arrived."""
        if not trainer.stop_signal:
            while (self.sending or self.last_sent < trainer.step) and not trainer.stop_signal:
                self.take_results(trainer)
                if not self.sending and self.last_sent < trainer.step:
                    self.push(trainer, last=True)
                time.sleep(0.02)
        with self.wake:
            self.closing = True
            self.wake.notify()
        self.thread.join(timeout=10)

    # the steps of the algorithm

    def own_books(self, state: dict) -> dict:
        """What the master has booked of this node. Raises Refused if another worker has its id."""
        books = state["nodes"].get(self.node_id, {})
        if books.get("incarnation", "") > self.incarnation:
            raise Refused(f"another worker has taken over the node id {self.node_id}; "
                          f"use another --node-id")
        return books

    def unsent(self, baseline: dict) -> dict:
        return {k: baseline[k] - v.detach().float().cpu() for k, v in self.tensors.items()}

    def rebase(self, new: dict, unsent: dict):
        """Move to G = new: the baseline without what was sent and is not in G, and the weights."""
        self.baseline = {k: v.clone() for k, v in new.items()}
        for _, delta in self.sent:
            for k in delta:
                self.baseline[k] -= delta[k]
        set_tensors(self.tensors, {k: self.baseline[k] - unsent[k] for k in unsent})

    def push(self, trainer, last=False):
        """Hand baseline - weights to the background thread, unless one is on its way or the master
        has not merged."""
        if (self.sending or self.last_sent == trainer.step
                or not last and len(self.sent) >= self.settings["max_pending"]):
            return
        delta = self.unsent(self.baseline)
        if not all(v.isfinite().all() for v in delta.values()):
            raise Refused(f"the weights are not finite at step {trainer.step}: nothing was sent")
        stored = encode(delta, self.settings["codec"])
        header = {"run_id": self.state["run_id"], "node_id": self.node_id,
                  "incarnation": self.incarnation, "local_step": trainer.step,
                  "base_outer_step": self.state["outer_step"],
                  "steps": trainer.step - self.last_sent,
                  "tokens": trainer.tokens - self.tokens_sent,
                  "loss": float(trainer.last_loss), "codec": self.settings["codec"]}
        path = f"nodes/{self.node_id}/delta_{trainer.step}.safetensors"
        with self.wake:
            self.sending = {"local_step": trainer.step, "delta": decode(stored), "stored": stored,
                            "path": path, "header": {k: str(v) for k, v in header.items()},
                            "tokens": trainer.tokens, "began": time.monotonic()}
            self.wake.notify()

    def take_results(self, trainer):
        """What the background thread has done since the last step."""
        if self.failed:
            raise self.failed
        sending, arrived = self.sending, self.arrived
        if arrived and sending and self.covers(arrived[0], sending["local_step"]):
            # it is in the new global before its own answer has come
            self.done = self.done or sending
        if self.done:
            for k, v in self.done["delta"].items():
                self.baseline[k] -= v
            self.sent.append((self.done["local_step"], self.done["delta"]))
            steps = self.done["local_step"] - self.last_sent
            self.last_sent, self.tokens_sent = self.done["local_step"], self.done["tokens"]
            size, seconds = self.done.get("size", 0), time.monotonic() - self.done["began"]
            trainer.emit("push", f"{trainer.progress()} | {steps} steps | {size / 1e6:.1f} MB | "
                         f"{seconds:.1f} s",
                         step=self.done["local_step"],
                         base_outer_step=int(self.done["header"]["base_outer_step"]),
                         steps=steps, bytes=size, seconds=seconds)
            self.done = self.sending = None
        if arrived:
            self.arrived = None
            self.install(trainer, *arrived)

    def covers(self, state: dict, local_step: int) -> bool:
        """Whether `state` has merged, or refused, this node's delta of that step."""
        books = state["nodes"].get(self.node_id, {})
        return (books.get("incarnation") == self.incarnation and books["local_step"] >= local_step
                or any(r["local_step"] == local_step for r in books.get("refused", ())))

    def install(self, trainer, state: dict, new: dict):
        """Move to a newer global model, keeping the work it does not hold."""
        began, books = time.monotonic(), self.own_books(state)
        for refused in books.get("refused", ()):
            if any(step == refused["local_step"] for step, _ in self.sent):
                trainer.emit("refused",
                             f"{trainer.progress()} | the delta of step {refused['local_step']}: "
                             f"{refused['reason']}",
                             step=refused["local_step"], reason=refused["reason"])
        unsent = self.unsent(self.baseline)
        self.sent = [(step, delta) for step, delta in self.sent if not self.covers(state, step)]
        self.state = state
        self.rebase(new, unsent)
        trainer.emit("install", f"{trainer.progress()} | outer step {state['outer_step']}",
                     step=trainer.step, outer_step=state["outer_step"],
                     seconds=time.monotonic() - began)

    def wait_for_round(self, trainer):
        """The synchronous algorithm: go on when the round with this node's work is published."""
        while (self.sending or self.sent) and not trainer.stop_signal:
            self.take_results(trainer)
            time.sleep(0.02)

    # the background thread

    def exchange(self):
        try:
            seen = None
            while not self.closing:
                if self.sending and not self.done:
                    self.done = self.upload(self.sending)
                head = retry(self.transport.head, self.log, self.hurry)
                if head != seen and not self.arrived:
                    self.look()
                    seen = head
                with self.wake:
                    if not self.closing and not (self.sending and not self.done):
                        self.wake.wait(self.settings["poll_interval"] * random.uniform(0.8, 1.2))
        except Exception as e:  # told to the training thread, which ends the run with it
            if not self.closing:
                self.failed = e

    def hurry(self) -> bool:
        return self.closing

    def look(self):
        """Fetch the global model if it is a newer one, or refuses something of ours."""
        _, files = retry(lambda: self.transport.snapshot([STEP], self.folder), self.log, self.hurry)
        state = json.loads(files[STEP].read_bytes())
        if (state["outer_step"] > self.state["outer_step"]
                or any(self.covers(state, step) for step, _ in self.sent)):
            state, file = read_published(self.transport, self.folder, self.log, self.hurry)
            self.arrived = state, load_file(file)

    def upload(self, sending: dict) -> dict:
        file = self.folder / "upload.safetensors"
        save_file(sending["stored"], file, metadata=sending["header"])
        size = file.stat().st_size

        def commit():
            try:
                self.transport.commit({sending["path"]: file},
                                      message=f"{self.node_id} step {sending['local_step']}")
            except Unavailable:     # a lost answer: has it arrived, or even been merged?
                _, files = self.transport.snapshot([STEP, sending["path"]], self.folder)
                if not (sending["path"] in files and sha256(files[sending["path"]]) == sha256(file)
                        or self.covers(json.loads(files[STEP].read_bytes()),
                                       sending["local_step"])):
                    raise
        retry(commit, self.log, self.hurry)
        return {**sending, "size": size}
