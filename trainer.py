"""
Data, device, precision, optimizer, checkpoints and THE LOOP.
Needs torch and numpy; knows nothing of any model.

    trainer = Trainer(model, config, *build_data(config))     # or your own Dataset or DataLoader
    trainer.train()

A model is any nn.Module called as model(input_ids, labels, attention_mask) that returns a loss, a
tuple, a dict or only logits. `config` is the nested dict of config.py. A coordinator, if there is
one, is called between the steps: this is where a swarm hooks in. One process, one device: no DDP,
no sharding.
"""
import contextlib
import ctypes
import glob
import hashlib
import html
import inspect
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import sysconfig
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch.utils.data import DataLoader, Dataset, IterableDataset

IGNORE = -100      # a label that does not count
WARM_STEPS = 3     # first steps of an invocation, left out of the token rate
PIECE = 1 << 17    # characters of text that are tokenized as one,
PIECES = 16        # and how many of those at a time, in parallel: 200 MiB
# keep: where text is cut for that, best first: where no usual tokenizer has one token over the cut,
# nor, with one more character on each side, another token beside it. Not beside what may be a
# special token, and not before "/", which some patterns join to a line end.
CUTS = [re.compile(pattern, re.S) for pattern in (
    r".*\n(?=[^\s/<[])", r".*[^\s>\]](?= [^\s<[])", r".*\S(?=\S)", r".+")]
SEPARATORS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
# of Okabe and Ito, which the colour-blind tell apart, but for the yellow
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


class TrainingError(RuntimeError):
    """What stops a run and is not a bug:
    a loss that is no number, a full disk, a token out of range."""


def say(line: str):
    print(line, flush=True)


def one_line(e: Exception) -> str:
    return " ".join(str(e).split()) or type(e).__name__

# ---- data: a pure function of (seed, node id, counter)


def mix(*parts) -> int:
    """64 well-mixed bits of the parts, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permute(i: int, n: int, key: int) -> int:
    """Where item i of n lands in the permutation `key`: computed, so no epoch is ever stored.

    A four-round Feistel network on the next even number of bits; what falls outside n walks on
    until it is inside (Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
    """
    bits = max(1, ((n - 1).bit_length() + 1) // 2)
    low = (1 << bits) - 1
    while True:
        left, right = i >> bits, i & low
        for rnd in range(4):
            x = (right + key + rnd * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            x = (x ^ x >> 29) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (x ^ x >> 32) & low
        i = left << bits | right
        if i < n:
            return i


class Tokens:
    """Token files end to end as one array.
    Nothing is kept in memory or open: a read is a seek and a copy."""
    sources, bytes_per_token = (), None     # where they are from; None = not known

    def __init__(self, files):
        self.files = [f for f in files if f[3]]                 # (path, dtype, byte offset, tokens)
        self.starts = [0, *itertools.accumulate(f[3] for f in self.files)]
        self.starts_array = np.array(self.starts)

    def __len__(self):
        return self.starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        parts, k = [], int(np.searchsorted(self.starts_array, start, side="right")) - 1
        while count:
            path, dtype, offset, length = self.files[k]
            first = start - self.starts[k]
            take = min(count, length - first)
            parts.append(np.fromfile(path, dtype, take,
                                     offset=offset + first * np.dtype(dtype).itemsize))
            if len(parts[-1]) != take:
                raise OSError(f"{path} has become shorter since the run began")
            start, count, k = start + take, count - take, k + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Synthetic:
    """Endless arithmetic sequences, 64 tokens each:
    start and stride are random, so only context predicts them."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def __len__(self):
        return 1 << 40

    def read(self, start: int, count: int) -> np.ndarray:
        position = np.arange(start, start + count, dtype=np.uint64)
        h = (position // 64 + 1) * np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ h >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        return ((h >> np.uint64(32))
                + position % 64 * (h >> np.uint64(40) & np.uint64(7))) % self.vocab_size


class Windows(Dataset):
    """Item i is a window of block_size tokens and its labels: {"input_ids": (T,), "labels": (T,)}.

    Training: epoch after epoch, each in an order and with an offset of its own. Validation (count
    given): the same `count` windows spread over all tokens. Raises ValueError when there are not
    enough tokens for one window.
    """

    def __init__(self, source, start: int, stop: int, config: dict, key: str, count: int = 0):
        self.source, self.start, self.tokens, self.count = source, start, stop - start, count
        self.vocab_size, self.block_size = (
            config["model"]["vocab_size"], config["model"]["block_size"])
        self.key = (config["run"]["seed"], config["distributed"]["node_id"])
        self.bytes_per_token = getattr(source, "bytes_per_token", None)
        self.windows = (self.tokens - 1) // self.block_size
        if self.windows < 1:
            raise ValueError(f"data.{key}={config['data'][key]} is too short: "
                             f"{self.tokens:,} tokens "
                             f"for {'validation' if count else 'training'} are no window of "
                             f"model.block_size={self.block_size}; "
                             f"give more text, or a smaller one")

    def __len__(self):
        return self.count or self.windows

    def __getitem__(self, i: int) -> dict:
        if self.count:
            first = i * self.windows // self.count * self.block_size
        else:
            epoch, i = divmod(i, self.windows)
            # window borders move from epoch to epoch
            shift = mix(*self.key, epoch, "shift") % self.block_size
            first = permute(i, self.windows, mix(*self.key, epoch)) * self.block_size + shift
            first %= self.tokens - self.block_size
        tokens = self.source.read(self.start + first, self.block_size + 1)
        if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= self.vocab_size:
            strange = tokens.min() if tokens.min() < 0 else tokens.max()
            raise TrainingError(f"token {strange} in the data is outside "
                                f"model.vocab_size={self.vocab_size}")
        tokens = torch.from_numpy(tokens.astype(np.int64))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def token_file(path: str) -> tuple:
    """(path, dtype, byte offset, tokens) of one file:
    .npy, .bin of nanoGPT (uint16) or llm.c (with its header), else text."""
    size = os.path.getsize(path)
    if path.endswith(".npy"):
        with open(path, "rb") as f:
            try:
                version = np.lib.format.read_magic(f)
                shape, _, dtype = (np.lib.format.read_array_header_1_0 if version == (1, 0)
                                   else np.lib.format.read_array_header_2_0)(f)
            except Exception as e:  # numpy reads the header as Python text
                raise ValueError(f"{path} is no .npy file: {one_line(e)}") from None
            if (len(shape) != 1 or dtype.kind not in "iu"
                    or f.tell() + shape[0] * dtype.itemsize > size):
                raise ValueError(f"{path} must hold one whole row of integers, not {dtype} {shape}")
            return path, dtype.str, f.tell(), shape[0]
    if not path.endswith(".bin"):
        return path, "u1", 0, size
    with open(path, "rb") as f:
        header = np.frombuffer(f.read(12), "<i4") if size >= 1024 else np.zeros(3)
    dtype, offset = {20240520: ("<u2", 1024), 20240801: ("<u4", 1024)}.get(
        int(header[0]), ("<u2", 0))
    count, rest = divmod(size - offset, int(dtype[2]))
    if rest or offset and count != header[2]:
        raise ValueError(f"{path} has {size} bytes, which is no whole number of tokens: "
                         f"cut off, or not a token file")
    return path, dtype, offset, count


def find_files(path: str, key: str) -> list[str]:
    """The files that data.path names, in an order that does not depend on the machine.
    Raises OSError."""
    if path == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
        found = [str(f) for f in root.rglob("*.py") if not skip & set(f.relative_to(root).parts)]
        # shuffled by name: the last tenth, which is held out, is then like the rest
        return sorted(found, key=lambda f: mix(Path(f).relative_to(root).as_posix()))
    if path.startswith("hf://"):
        # only here: training needs no network
        from huggingface_hub import HfFileSystem, hf_hub_download
        fs = HfFileSystem()
        try:
            found = [fs.resolve_path(f)
                     for f in sorted(fs.find(path) if fs.isdir(path) else fs.glob(path))]
            found = [hf_hub_download(f.repo_id, f.path_in_repo, repo_type=f.repo_type,
                                     revision=f.revision) for f in found]
        except Exception as e:  # the network has many ways to fail
            raise OSError(f"data.{key}={path}: {one_line(e)}") from e
    elif os.path.isdir(path):
        found = sorted(str(f) for f in Path(path).rglob("*") if f.is_file()
                       and not any(part.startswith(".") for part in f.relative_to(path).parts))
    else:
        found = [path] if os.path.isfile(path) else sorted(
            f for f in glob.glob(path, recursive=True) if os.path.isfile(f))
    if not found:
        raise FileNotFoundError(f"data.{key}={path}: nothing there; "
                                f"give a file, a folder, a glob, stdlib or synthetic")
    return found


def tokenizer_paths(name: str) -> list[Path]:
    """tokenizer.json of a data.tokenizer, and what belongs to it and is there.
    Raises ValueError or OSError, in one line, if there is none."""
    path, more = Path(name), ["tokenizer_config.json", "chat_template.jinja"]
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
            raise FileNotFoundError(f"data.tokenizer={name}: no tokenizer.json there; "
                                    f"give one, a folder that holds it, or user/name on the Hub")
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError
        try:
            path = Path(hf_hub_download(name, "tokenizer.json"))
            for beside in more:     # they come to lie beside it
                with contextlib.suppress(RemoteEntryNotFoundError):
                    hf_hub_download(name, beside)
        except Exception as e:  # the network has many ways to fail
            raise OSError(f"data.tokenizer={name} is no file here, and the Hub does not give it: "
                          f"{one_line(e)[:200]}") from None
    return [path] + [p for p in map(path.with_name, more) if p.is_file()]


def load_tokenizer(name: str):
    """(tokenizer, size of its vocabulary, id of the token between documents or None, its files) of
    a data.tokenizer. Raises ValueError or OSError, in one line, if it cannot be used."""
    # else it warns when a DataLoader forks, which is harmless: those processes only read
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        from tokenizers import Tokenizer    # only here: bytes need no package
    except ImportError:
        raise ValueError(f"data.tokenizer={name} needs a package: pip install tokenizers") from None
    path, *beside = paths = tokenizer_paths(name)
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
        eos = (json.loads(beside[0].read_text("utf-8")).get("eos_token")
               if beside and beside[0].name == "tokenizer_config.json" else None)
        size = 1 + max(tokenizer.get_vocab().values())
    except Exception as e:  # tokenizers has many ways to fail
        raise ValueError(f"data.tokenizer={name} cannot be used: {one_line(e)[:200]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eos = eos.get("content") if isinstance(eos, dict) else eos
    ids = [tokenizer.token_to_id(token) for token in (eos, *SEPARATORS) if isinstance(token, str)]
    separator = next((i for i in ids if i is not None), None)
    return tokenizer, size, separator, paths


class Text:
    """Prompts as token ids and back: as bytes, or by data.tokenizer, which is read once."""

    def __init__(self, config: dict):
        name = config["data"]["tokenizer"]
        self.tokenizer = load_tokenizer(name)[0] if name else None

    def encode(self, text: str) -> list[int]:
        """With the token that starts a text if the tokenizer puts one there (as transformers does
        with what is exported)."""
        return self.tokenizer.encode(text).ids if self.tokenizer else list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Ids that only pad the vocabulary have no text."""
        return (self.tokenizer.decode(ids, skip_special_tokens=False) if self.tokenizer
                else bytes(i for i in ids if i < 256).decode(errors="replace"))


def pieces(path: str):
    """A text file in pieces (text, start, stop) such that the tokens of each text[start:stop], read
    within its text, are together those of the whole file. The last one has stop None."""
    with open(path, encoding="utf-8", errors="replace", newline="") as f:
        lead, text = "", f.read(PIECE)
        while more := f.read(PIECE):
            kind, cut = next((k, m.end()) for k, c in enumerate(CUTS) if (m := c.match(text)))
            # one character more: space at the end of a text has other tokens than inside
            tail = text[cut:cut + 1] if kind < 2 else ""
            yield lead + text[:cut] + tail, len(lead), len(lead) + cut if tail else math.inf
            text = text[cut:] + more
            # and one before: some tokenizers put a space at the start of a text
            lead = "a" if text[0].isspace() else "\n"
        yield lead + text, len(lead), None


def tokenize(files: list[str], tokenizer, separator: int | None):
    """Yield (token ids, about so many bytes of text), a separator at the end of each file."""
    work = itertools.chain.from_iterable(map(pieces, files))
    while batch := list(itertools.islice(work, PIECES)):
        try:
            encoded = tokenizer.encode_batch([text for text, _, _ in batch],
                                             add_special_tokens=False)
        except Exception as e:  # a character that it has no token for, say
            raise TrainingError(f"data.tokenizer fails on the text: {one_line(e)}") from None
        for (text, start, stop), found in zip(batch, encoded):
            first, last = 0, len(found)
            while start and first < last and found.token_to_chars(first)[1] <= start:
                first += 1
            while stop and first < last and found.token_to_chars(last - 1)[1] > stop:
                last -= 1
            ids = found.ids[first:last]
            if stop is None and separator is not None and ids[-1:] != [separator]:
                ids.append(separator)
            yield ids, len(text.encode())


def make_token_file(files: list[str], config: dict, loaded: tuple) -> str:
    """The .npy file of the tokens of text files, made once: its name is a hash of the tokenizer and
    of path, size and time of the files. Raises OSError or TrainingError."""
    tokenizer, vocab_size, separator, (tokenizer_json, *_) = loaded
    digest = hashlib.blake2b(tokenizer_json.read_bytes(), digest_size=8).hexdigest()
    stats = [(os.path.realpath(f), os.stat(f)) for f in files]
    stats = [(f, stat.st_size, stat.st_mtime_ns) for f, stat in stats if stat.st_size]
    total, folder = sum(size for _, size, _ in stats), Path(config["run"]["output_dir"], "tokens")
    path = folder / f"{mix('tokens', digest, separator, stats):016x}.npy"
    dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"

    def header(f, count):       # numpy pads it: that of the real count fits in later
        f.seek(0)
        np.lib.format.write_array_header_1_0(
            f, {"descr": dtype, "fortran_order": False, "shape": (count,)})
        return f.tell()

    def write(f):
        from tqdm import tqdm   # comes with huggingface_hub; disable=None: only on a terminal
        start, count = header(f, 0), 0
        with tqdm(desc="tokens", total=total, unit="B", unit_scale=True, disable=None) as bar:
            for ids, size in tokenize([name for name, _, _ in stats], tokenizer, separator):
                f.write(np.array(ids, dtype).tobytes())
                count += len(ids)
                bar.update(min(size, total - bar.n))
        assert header(f, count) == start, path

    reused = path.exists()
    if not reused:
        say(f"tokens   making {path}, or waiting for the process that does")
        if separator is None:
            say("notice   this tokenizer has no token to put between documents")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / ".lock"):
                if not path.exists():
                    for leftover in folder.glob("*.tmp"):   # of a process that was killed
                        leftover.unlink()
                    write_atomically(path, write)
        except OSError as e:
            raise OSError(f"run.output_dir: cannot write to {folder}: {one_line(e)}") from e
    count = token_file(str(path))[3]
    say(f"tokens   {count:,} tokens of {total:,} bytes | {total / max(1, count):.2f} bytes per "
          f"token | {path}{' from before' if reused else ''}")
    return str(path)


def open_tokens(config: dict, key: str, without=(), loaded=None):
    """The token array behind data.path or data.val_path (`key`), leaving files out; `loaded` is
    the tokenizer for those that are text.
    Raises OSError, ValueError or TrainingError, in one line, for what cannot be used."""
    path = config["data"][key]
    if path == "synthetic":
        return Synthetic(config["model"]["vocab_size"])
    out = {os.path.realpath(f) for f in without}
    files = [f for f in find_files(path, key) if os.path.realpath(f) not in out]
    texts, numbers = [], []
    for f in files:
        (numbers if f.endswith((".bin", ".npy")) else texts).append(f)
    parts = [make_token_file(texts, config, loaded), *numbers] if loaded and texts else files
    tokens = Tokens([token_file(f) for f in parts])
    if not len(tokens):
        raise ValueError(f"data.{key}={path} is empty"
                         + (", validation data left out" if without else ""))
    tokens.sources = files
    if not numbers:
        tokens.bytes_per_token = sum(map(os.path.getsize, files)) / len(tokens)
    return tokens


def build_data(config: dict) -> tuple[Dataset, Dataset]:
    """(training data, validation data), disjoint: data.val_path, or the last tenth of data.path.
    With a data.tokenizer model.vocab_size may grow: build the model after this."""
    name, loaded = config["data"]["tokenizer"], None
    if name:
        loaded = load_tokenizer(name)
        config["model"]["vocab_size"] = max(config["model"]["vocab_size"], loaded[1])
    count = config["run"]["eval_batches"] * config["data"]["micro_batch_size"]
    if config["data"]["val_path"]:
        val = open_tokens(config, "val_path", loaded=loaded)
        train = open_tokens(config, "path", getattr(val, "sources", ()), loaded)
        return (Windows(train, 0, len(train), config, "path"),
                Windows(val, 0, len(val), config, "val_path", count))
    both = open_tokens(config, "path", loaded=loaded)
    cut = len(both) - len(both) // 10
    return (Windows(both, 0, cut, config, "path"),
            Windows(both, cut, len(both), config, "path", count))


def byte_tokenizer() -> dict:
    """The tokenizer.json of models of bytes: a byte-level BPE without merges, token = byte."""
    # byte-level BPE writes a byte as a printable character, GPT-2's way
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
            "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
            "model": {"type": "BPE", "merges": [], "vocab": {
                chr(b if b in plain else next(others)): b for b in range(256)}}}


def tokenizer_files(config: dict) -> tuple[dict, int | None]:
    """({name: bytes} of the files with which transformers' AutoTokenizer reads and writes this
    model's tokens, the id that ends a text or None). No files if the tokens came as numbers."""
    name, settings = config["data"]["tokenizer"], {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": config["model"]["block_size"]}
    files, eos = {}, None
    if name:
        tokenizer, _, eos, (tokenizer_json, *beside) = load_tokenizer(name)
        if eos is not None:
            settings["eos_token"] = tokenizer.id_to_token(eos)
        files = {"tokenizer.json": tokenizer_json.read_bytes(),
                 **{p.name: p.read_bytes() for p in beside}}
    elif config["model"]["vocab_size"] == 256:
        files = {"tokenizer.json": json.dumps(byte_tokenizer()).encode()}
    if files:
        files.setdefault("tokenizer_config.json", json.dumps(settings, indent=2).encode())
    return files, eos


@contextlib.contextmanager
def seeded(*parts):
    """Random numbers as a function of `parts` in here, and as if nothing had been drawn after
    it."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(mix(*parts) >> 1)
    np.random.seed(mix(*parts) & 0xFFFFFFFF)
    random.seed(mix(*parts))
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class Shuffled(Dataset):
    """A user's map-style Dataset, epoch after epoch, each in a computed order of its own;
    what it draws at random for an item (augmentation) depends on the counter alone, too."""

    def __init__(self, dataset, config):
        self.dataset, self.key = dataset, (config["run"]["seed"], config["distributed"]["node_id"])

    def __getitem__(self, i):
        epoch, item = divmod(i, len(self.dataset))
        with seeded(*self.key, i, "item"):
            return self.dataset[permute(item, len(self.dataset), mix(*self.key, epoch))]


def worker_init(_):
    # A signal to the whole group is for the training process, which finishes its step and ends its
    # workers; one that is stuck ends itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(30))


def is_map_style(data) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def replay(loader, config: dict, position: int):
    """The batches of somebody else's loader, epoch after epoch, from a position on. What it draws
    at random is seeded batch by batch, so it draws the same again and the model's dropout never
    notices."""
    key, skip = (config["run"]["seed"], config["distributed"]["node_id"]), position
    for epoch in itertools.count():
        with seeded(*key, epoch, "epoch"):
            iterator = iter(loader)
        for i in itertools.count():
            with seeded(*key, epoch, i, "batch"):
                batch = next(iterator, None)
            if batch is None:
                break
            skip -= config["data"]["micro_batch_size"]
            if skip < 0:
                yield batch
        if i == 0:
            raise TrainingError("the training data gave no batch")


def batches(data, config: dict, position: int, device: torch.device):
    """Yield microbatches for ever, from sample `position` on. `data`: a Dataset, anything with
    a length and items, or an iterable of batches such as a DataLoader."""
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=config["data"]["micro_batch_size"])
    if not is_map_style(data):
        yield from replay(data, config, position)
    if not len(data):
        raise TrainingError("the training data is empty")
    if not isinstance(data, Windows):
        data = Shuffled(data, config)
    c = config["data"]
    pin = device.type == "cuda" if c["pin_memory"] == "auto" else c["pin_memory"] == "true"
    workers = dict(prefetch_factor=c["prefetch_factor"], persistent_workers=True,
                   worker_init_fn=worker_init)
    iterator = iter(DataLoader(
        data, batch_size=c["micro_batch_size"], sampler=itertools.count(position), pin_memory=pin,
        num_workers=c["num_workers"], **(workers if c["num_workers"] else {}),
        generator=torch.Generator()))  # keep: its own, or each start would move the dropout masks
    try:
        yield from iterator
    finally:
        if c["num_workers"]:
            iterator._shutdown_workers()    # now, not when the interpreter ends and signals them

# ---- device, precision, optimizer, learning rate


def pick_device(name: str) -> torch.device:
    """The device that run.device names; auto is cuda, mps, cpu in that order.
    Raises ValueError if it is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(),
             "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind in there if there[kind]))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"run.device={name} is not one of auto, {', '.join(there)}") from None
    if (not there.get(device.type)
            or device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"run.device={name} is not there; "
                         f"this machine has {', '.join(k for k in there if there[k])}")
    return device


def cpu_has_fast_bf16() -> bool:
    """Whether bf16 products beat fp32: AMX tiles, AMD's AVX512_BF16, ARM's BF16.

    Not Intel's AVX512_BF16 without AMX, which does 165 GFLOP/s where fp32 does 310.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    cpu = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return (torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_supported()
            or "AMD" in cpu.get("cpu_name", ""))


def pick_precision(wanted: str, device: torch.device) -> tuple[torch.dtype, str]:
    """(dtype of autocast, why) for run.precision. What the hardware lacks becomes fp32."""
    cuda = device.type == "cuda"
    bf16 = (torch.cuda.is_bf16_supported(including_emulation=False) if cuda
            else device.type == "cpu" and cpu_has_fast_bf16())
    if wanted == "auto":
        if not cuda:
            return torch.float32, f"auto on {device.type}"
        return ((torch.bfloat16, "auto, native here") if bf16
                else (torch.float16, "auto, no native bf16 here"))
    if wanted == "bf16" and not bf16 or wanted == "fp16" and not cuda:
        return torch.float32, f"{wanted} was asked for, but this {device.type} has no fast {wanted}"
    return ({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wanted],
            "as asked for")


def build_optimizers(
        model: nn.Module, c: dict, device: torch.device) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the hidden matrices and AdamW for the rest.

    Weight decay on 2 dimensions or more.

    Hidden matrices are those of neither an embedding nor the last nn.Linear, which is the output.
    Every trainable parameter is in exactly one group.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    hidden = set()
    if c["name"] == "muon":
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        outside = ([m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
                   + [m.weight for m in linears[-1:]])
        hidden = {id(p) for p in params if p.dim() == 2} - {id(p) for p in outside}
    groups = [[p for p in params if id(p) in hidden],
              [p for p in params if id(p) not in hidden and p.dim() >= 2],
              [p for p in params if id(p) not in hidden and p.dim() < 2]]
    assert sorted(id(p) for g in groups for p in g) == sorted(id(p) for p in params), \
        "a parameter is in no group, or two"
    optimizers = []
    if groups[0]:  # match_rms_adamw: updates the size of AdamW's, so one learning rate serves both
        optimizers.append(torch.optim.Muon(groups[0], lr=c["lr"], weight_decay=c["weight_decay"],
                                           adjust_lr_fn="match_rms_adamw"))
    decays = [dict(params=g, weight_decay=wd)
              for g, wd in zip(groups[1:], (c["weight_decay"], 0.0)) if g]
    if decays:
        options = dict(lr=c["lr"], betas=c["betas"], eps=c["eps"])
        try:
            optimizers.append(torch.optim.AdamW(decays, **options, fused=c["fused"] or None))
        except RuntimeError:  # no fused kernel for this device or dtype
            optimizers.append(torch.optim.AdamW(decays, **options))
    if not optimizers:
        raise ValueError("the model has no trainable parameter")
    return optimizers


def lr_factor(step: int, c: dict) -> float:
    """Learning rate of the update that leads from `step` to step + 1, as a part of the peak."""
    if step < c["warmup_steps"]:
        return (step + 1) / c["warmup_steps"]
    progress = min(1.0, (step - c["warmup_steps"]) / max(1, c["max_steps"] - c["warmup_steps"]))
    decay = {"constant": 0.0, "cosine": 0.5 * (1 - math.cos(math.pi * progress)),
             "wsd": max(0.0, progress - 0.8) / 0.2}[c["name"]]
    return 1 - decay * (1 - c["min_lr_ratio"])


def keep_freed_memory():
    """Have glibc keep freed blocks for the next step:
    giving them back and faulting them in again is 5 % of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(-3, 32 << 20)       # M_MMAP_THRESHOLD: blocks up to 32 MiB from the heap
        mallopt(-1, 2**31 - 1)      # M_TRIM_THRESHOLD: and the heap does not shrink

# ---- calling a model that is not ours


def as_batch(batch) -> dict:
    """A batch of tensors as {"input_ids", "labels", maybe "attention_mask", ...},
    from a dict, a tuple or a tensor.

    Missing labels are the next tokens; padding and the last position do not count.
    """
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if isinstance(batch, (tuple, list)):
        batch = dict(zip(("input_ids", "labels", "attention_mask"), batch))
    batch = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    if "labels" not in batch:
        labels = torch.full_like(batch["input_ids"], IGNORE)
        labels[:, :-1] = batch["input_ids"][:, 1:]
        if "attention_mask" in batch:
            labels[:, :-1].masked_fill_(batch["attention_mask"][:, 1:] == 0, IGNORE)
        batch["labels"] = labels
    return batch


def call_arguments(model: nn.Module, batch: dict) -> tuple[list, dict]:
    """How to call `model`: labels and extras by name where forward has the name, labels as second
    argument where it wants one. transformers' models shift labels once more, so those get none."""
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        return [batch["input_ids"]], {k: v for k, v in batch.items() if k == "attention_mask"}
    parameters = inspect.signature(model.forward).parameters.values()
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    named = {k: v for k, v in batch.items() if k != "input_ids" and (anything or k in names)}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    takes_labels = "labels" not in named and second is not None and second.name not in batch and (
        second.default is second.empty or second.name in ("targets", "target", "labels", "y"))
    return [batch["input_ids"]] + [batch["labels"]] * takes_labels, named


def loss_of(output, labels) -> torch.Tensor:
    """The scalar loss in what a model returned; from logits (B, T, V) it is the causal LM loss."""
    def get(key):
        return output.get(key) if hasattr(output, "keys") else getattr(output, key, None)
    found = [o for o in (get("loss"), get("logits")) if o is not None] or output
    tensors = [o for o in (found if isinstance(found, (tuple, list)) else (found,))
               if isinstance(o, torch.Tensor)]
    for tensor in tensors:
        if tensor.numel() == 1:
            return tensor.reshape(())
    if not tensors or tensors[0].shape[:-1] != labels.shape:
        raise TrainingError(f"the model returned {type(output).__name__}, which holds neither a "
                            f"loss nor logits of shape (B, T, V)")
    logits = tensors[0].float()
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(),
                            ignore_index=IGNORE, reduction="sum")
    return total / (labels != IGNORE).sum().clamp(min=1)


def batch_loss(forward, model, batch, device, dtype) -> torch.Tensor:
    """Loss of one batch; `forward` is the model, or the compiled one."""
    batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
    arguments, named = call_arguments(model, batch)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        return loss_of(forward(*arguments, **named), batch["labels"])


@torch.no_grad()
def mean_loss(model, data, config: dict, device, dtype=torch.float32) -> float:
    """Mean loss over the first run.eval_batches microbatches of `data`, without dropout."""
    if is_map_style(data) or isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=config["data"]["micro_batch_size"])
    model.eval()
    with seeded("eval"):    # the same batches each time, and training does not notice
        losses = [batch_loss(model, model, as_batch(b), device, dtype).item()
                  for b in itertools.islice(data, config["run"]["eval_batches"])]
    model.train()
    if not losses:
        raise TrainingError("the validation data gave no batch")
    return sum(losses) / len(losses)


@torch.no_grad()
def generate(model: nn.Module, ids: list[int], config: dict, count: int, cache=True) -> list[int]:
    """`ids` and `count` tokens after them, as config.sample says, from any model that returns
    logits. A context of block_size tokens loses its older half. Keys and values are kept if the
    model's forward takes a `cache`: the same tokens, in a fraction of the time."""
    c, block_size = config["sample"], config["model"]["block_size"]
    device = next(model.parameters()).device
    # its own: a sample must not move the training run
    generator = torch.Generator().manual_seed(config["run"]["seed"])
    was_training, kept = model.training, {}
    named = ({"cache": kept} if cache and "cache" in inspect.signature(model.forward).parameters
             else {})
    model.eval()
    ids, start = list(ids), max(0, len(ids) - block_size)
    for _ in range(count):
        if len(ids) - start > block_size:
            start = len(ids) - (block_size + 1) // 2
            kept.clear()
        seen = start + kept.get("length", 0)
        output = model(torch.tensor([ids[seen:]], device=device), **named)
        logits = (output["logits"] if hasattr(output, "keys")
                  else output[0] if isinstance(output, tuple) else output)
        ids.append(pick(logits[0, -1].float().cpu(), c, generator))
    model.train(was_training)
    return ids


def pick(logits, c: dict, generator) -> int:
    """A token by temperature, top_k and top_p (Holtzman et al., 2019), from logits (V,)."""
    if not c["temperature"]:
        return int(logits.argmax())
    probs = torch.softmax((logits - logits.max()) / c["temperature"], -1)
    probs, order = probs.sort(descending=True, stable=True)
    if c["top_k"]:
        probs[c["top_k"]:] = 0
    probs[probs.cumsum(0) - probs >= c["top_p"] * probs.sum()] = 0      # the first one always stays
    return int(order[torch.multinomial(probs, 1, generator=generator)])

# ---- checkpoints


def write_atomically(path: Path, write) -> None:
    """Call write(file), and let `path` be the whole result or what it was before.
    Raises TrainingError on a full disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # the rename itself
            os.close(folder)
    except (OSError, RuntimeError) as e:  # torch.save reports a failed write as a RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise TrainingError(f"cannot write {path}: {one_line(e)[:200]}") from e


def read_checkpoint(path: Path, device="cpu") -> dict:
    """A checkpoint whose every byte was checked against its CRC.
    Raises ValueError if it is damaged."""
    try:
        with zipfile.ZipFile(path) as z:
            if bad := z.testzip():
                raise ValueError(f"{bad} does not match its checksum")
        state = torch.load(path, map_location=device, weights_only=True)
        state["model"], state["optimizers"], state["random"]  # is it a checkpoint at all?
        return state
    except Exception as e:  # a damaged file can fail anywhere in zip, pickle and torch
        raise ValueError(f"{path} is damaged: {one_line(e)[:200]}") from e


def random_state() -> dict:
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {"torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
            "numpy": (keys.tolist(), position, has_gauss, cached), "python": random.getstate()}


def set_random_state(state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["mps"] is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    np.random.set_state(("MT19937", *state["numpy"]))
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))


# ---- watching: a picture, TensorBoard, a bar


def ticks(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Round values from low to high: steps of 1, 2 or 5 times a power of ten, of at least `least`,
    at most so many and one."""
    wanted = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(s * power for s in (1, 2, 5, 10) if s * power >= wanted * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9),
                                    math.floor(high / step + 1e-9) + 1)]


def means(points: list, most: int) -> list:
    """At most so many points, each the mean of its share: a smooth curve."""
    return points if len(points) <= most else [
        tuple(part.mean(axis=0)) for part in np.array_split(np.array(points, float), most)]


def spread(places: list[float], gap: float, top: float, bottom: float) -> list[float]:
    """Rising places in [top, bottom], moved as little as it takes to be `gap` apart, if they
    fit."""
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], bottom - gap * (len(places) - 1 - i))
    return [max(y, top) for y in places]


def draw(runs: dict, title: str = "") -> str:
    """An SVG of the losses and, below, of the learning rates of some runs.

    runs: {name: {"train": [(step, loss)], "val": [(step, loss)], "lr": [(step, lr)]}}, each list
    may be empty or missing; None, NaN and infinity are left out. Train is thin, a mean of many
    points, val is thick. Each run's name and last loss stand at the end of its curve.
    """
    def attributes(look):
        return "".join(f' {k.replace("_", "-")}="{v}"' for k, v in look.items())

    def text(content, x, y, anchor="start", **look):
        return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes(look)}>'
                f'{html.escape(content)}</text>')

    def short(value):
        size, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k"))
                           if abs(value) >= s), (1, ""))
        return f"{value / size:.4g}{unit}"

    def panel(name, top, height, y_low, y_high):
        """Draws a frame with a grid; at(x, y) is a point in it, in pixels."""
        def at(x, y):
            down = min(max((y_high - y) / (y_high - y_low), 0), 1)      # outside: on the frame
            return left + (x - x_low) / (x_high - x_low) * (right - left), top + down * height
        for value in ticks(y_low, y_high, height // 35):
            _, y = at(x_low, value)
            out.extend([f'<path d="M{left} {y:.1f}H{right}" stroke="#ddd"/>',
                        text(short(value), left - 7, y + 4, "end")])
        for value in ticks(x_low, x_high, 8, 1):
            x, _ = at(value, y_low)
            out.extend([f'<path d="M{x:.1f} {top}v{height}" stroke="#ddd"/>',
                        text(short(value), x, top + height + 16, "middle")])
        middle = top + height / 2
        out.extend([f'<rect x="{left}" y="{top}" width="{right - left}" height="{height}" '
                    f'fill="none" stroke="#888"/>',
                    text(name, 14, middle, "middle", transform=f"rotate(-90 14 {middle})")])
        return at

    def curve(at, points, colour, **look):
        places = [at(*p) for p in points]
        if len(places) == 1:
            out.append(f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3" '
                       f'fill="{colour}"/>')
        elif places:
            out.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" '
                       f'fill="none" stroke="{colour}"{attributes(look)}/>')

    def drawable(points):
        return sorted(p for p in points or () if all(
            isinstance(v, (int, float)) and math.isfinite(v) for v in p))
    curves = [{kind: drawable(run.get(kind)) for kind in ("train", "val", "lr")}
              for run in runs.values()]
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(curves))]
    steps = [x for run in curves for points in run.values() for x, _ in points] or [0]
    x_low, x_high = min(steps), max(max(steps), min(steps) + 1)
    left, right, top, height = 66, 590, 40, max(300, 14 * len(curves))

    # without the fall of the first steps, and without the end of a run that blew up: from the
    # lowest loss to five times the way to the third quartile, of the best run
    losses = [sorted(y for kind in ("train", "val") for _, y in run[kind]) for run in curves]
    ranges = [(values[len(values) // 100], min(values[-1], values[0] + 5 * (
        values[len(values) * 3 // 4] - values[0]))) for values in losses if values]
    low = min((low for low, _ in ranges), default=0.0)
    high = max(min((high for _, high in ranges), default=1.0), low)
    room = (high - low) * 0.05 or abs(low) * 1e-3 or 1.0
    out = [text(title or "thick: validation, thin: training", left, 26, font_weight="bold")]
    at, ends = panel("loss", top, height, low - room, high + room), []
    for run, colour in zip(curves, colours):
        curve(at, means(run["train"], 300), colour, stroke_width=1, opacity=0.7)
    for run, colour, name in zip(curves, colours, runs):
        curve(at, means(run["val"], 300), colour, stroke_width=2.5)
        shown = "".join(c for c in name if c.isprintable())[:20]
        if last := (run["val"] or run["train"])[-1:]:
            value = f"{last[0][1]:.4f}" if abs(last[0][1]) < 1000 else f"{last[0][1]:.1e}"
            ends.append((at(*last[0])[1], colour, f"{value} {shown}"))
        else:
            ends.append((top + height, colour, shown))
    ends.sort()
    places = spread([y for y, _, _ in ends], 14, top, top + height)
    out += [text(label, right + 8, y + 4, fill=colour)
            for y, (_, colour, label) in zip(places, ends)]
    bottom = top + height
    if rates := [lr for run in curves for _, lr in run["lr"]]:
        at = panel("learning rate", bottom + 36, 80, 0, max(rates) * 1.1 or 1.0)
        bottom += 116
        for run, colour in zip(curves, colours):
            curve(at, means(run["lr"], 300), colour, stroke_width=1.5)
    out.append(text("step", (left + right) / 2, bottom + 36, "middle"))
    size = f'width="800" height="{bottom + 46}"'        # white: the page may be dark
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 800 '
                      f'{bottom + 46}" font-family="sans-serif" font-size="12" fill="#222">',
                      f'<rect {size} fill="#fff"/>', *out, "</svg>\n"])


def read_curves(path: Path) -> dict:
    """What draw() takes of a run, out of its metrics.jsonl. A line that is damaged, or cut off
    because the run is writing it, is left out. Raises OSError."""
    curves = {"train": [], "val": [], "lr": []}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(line)
            if event["event"] == "step":
                curves["train"].append((event["step"], event["loss"]))
                curves["lr"].append((event["step"], event["lr"]))
            elif event["event"] == "eval":
                curves["val"].append((event["step"], event["val_loss"]))
    return curves


def plot(config: dict) -> Path:
    """Write loss.svg and return its path: in the run's folder or, for several runs (run.name=a,b),
    in run.output_dir. The nodes of a swarm below runs/<name>/ are several runs too. It only reads
    the runs, which may be going on. Raises FileNotFoundError with the runs there are, ValueError
    for runs without a loss."""
    root, node = Path(config["run"]["output_dir"]), config["distributed"]["node_id"]
    folders = [root / name.strip() / node for name in config["run"]["name"].split(",")
               if name.strip()]
    files = []
    for folder in folders:
        own = folder / "metrics.jsonl"
        files += [own] if own.exists() else sorted(folder.glob("*/metrics.jsonl"))
        if not files or folder not in (files[-1].parent, files[-1].parent.parent):
            there = sorted(p.parent.relative_to(root).as_posix() for depth in ("*", "*/*")
                           for p in root.glob(f"{depth}/metrics.jsonl"))
            raise FileNotFoundError(f"--plot: no run in {folder}; "
                                    f"there are: {', '.join(there) or 'none'}")
    runs = {f.parent.relative_to(root).as_posix(): read_curves(f) for f in files}
    if not any(run["train"] or run["val"] for run in runs.values()):
        raise ValueError(f"--plot: no loss to draw yet in {', '.join(map(str, files))}")
    path = (folders[0] if len(folders) == 1 else root) / "loss.svg"
    path.write_text(draw(runs), encoding="utf-8")
    return path


class TensorBoard:
    """A hook: the numbers of metrics.jsonl as scalars. Raises ValueError without the package."""

    def __init__(self):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as e:
            raise ValueError(f"logging.tensorboard=True needs a package: pip install tensorboard "
                             f"({one_line(e)[:100]})") from e
        self.make = SummaryWriter

    def open(self, folder: Path, step: int):
        # what an earlier process has written of the steps after this one is forgotten
        self.writer = self.make(folder, purge_step=step + 1, flush_secs=10)

    def __call__(self, event: str, payload: dict):
        names = {"step": {f"train/{k}": k for k in ("loss", "lr", "grad_norm", "tokens_per_s")},
                 "eval": {"val/loss": "val_loss", "val/loss_per_byte": "val_loss_per_byte"}}
        for name, key in names.get(event, {}).items():
            if payload.get(key) is not None:
                self.writer.add_scalar(name, payload[key], payload["step"])


class AboveBar:
    """Stands for stdout or stderr while a bar is drawn: whole lines go above it, whoever prints."""

    def __init__(self, stream, bar):
        self.stream, self.bar, self.rest = stream, bar, ""

    def write(self, text: str) -> int:
        with self.bar.get_lock():       # a coordinator's thread may print too
            *lines, self.rest = (self.rest + text).split("\n")
            if lines:
                self.bar.clear(nolock=True)
                self.stream.write("\n".join(lines) + "\n")
                self.stream.flush()
                self.bar.refresh(nolock=True)
        return len(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


@contextlib.contextmanager
def bar(first: int, total: int):
    """A progress bar in the last line of a terminal; None if stdout is none, or without tqdm."""
    drawn, out, error = None, sys.stdout, sys.stderr
    if first < total and out and out.isatty() and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(ImportError):
            from tqdm import tqdm       # comes with huggingface_hub
            drawn = tqdm(initial=first, total=total, file=out, dynamic_ncols=True,
                         bar_format="step     {n_fmt}/{total_fmt} |{bar}| {desc}")
    if drawn is None or drawn.disable:  # by TQDM_DISABLE=1
        yield None
        return
    above_error = AboveBar(error, drawn) if error and error.isatty() else error
    try:
        with (contextlib.redirect_stdout(AboveBar(out, drawn)),
              contextlib.redirect_stderr(above_error)):
            yield drawn
    finally:
        drawn.close()       # it stays, as a whole line, with the last loss


# ---- the trainer


class Trainer:
    """Trains `model` on `train_data` until config.run.max_steps.

    train_data, val_data: a Dataset of dicts or tuples (put in order, resumed and split between
    nodes here) or a DataLoader of yours. hooks: callables given (event, payload) for each line of
    metrics.jsonl. coordinator: an object with start(trainer), after_step(trainer), finish(trainer),
    state_dict() and load_state_dict(state), called before the first step, after each optimizer
    step, at the end, and with each checkpoint; it may change weights and `step`. If it has them,
    the learning rate is that of schedule_step(step), times lr_scale(step).

    Raises ValueError or OSError at once for what cannot be trained or resumed, TrainingError later.
    """

    def __init__(self, model, config: dict, train_data, val_data=None, coordinator=None, hooks=()):
        run = config["run"]
        # first of all: if the package is missing, nothing has been touched
        self.tensorboard = TensorBoard() if config["logging"]["tensorboard"] else None
        self.config, self.train_data, self.val_data = config, train_data, val_data
        self.coordinator, self.hooks, self.bar = coordinator, list(hooks), None
        self.text = None            # made for the first sample
        self.device = pick_device(run["device"])
        self.dtype, why = pick_precision(run["precision"], self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        elif self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 for what stays fp32
        torch.manual_seed(mix(run["seed"], config["distributed"]["node_id"]) >> 1)  # dropout
        self.model = model.to(self.device)
        if run["gradient_checkpointing"]:
            if not hasattr(model, "set_gradient_checkpointing"):
                raise ValueError("run.gradient_checkpointing=True: "
                                 "this model has no set_gradient_checkpointing(enabled)")
            model.set_gradient_checkpointing(True)
        self.optimizers = build_optimizers(model, config["optimizer"], self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.forward = torch.compile(model) if run["compile"] else model

        # absolute step; samples and tokens consumed so far
        self.step = self.position = self.tokens = 0
        self.best = {"step": None, "val_loss": math.inf}
        # has a loss or gradient been no number?
        self.not_finite = torch.zeros((), dtype=torch.bool, device=self.device)
        self.last_loss = torch.zeros(())
        self.stop_signal = None
        self.folder = Path(run["output_dir"], run["name"], config["distributed"]["node_id"])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / ".lock")     # the kernel drops it with the process
            self.lock.acquire(timeout=0)
            (self.folder / "latest.json.tmp").write_text("?")  # can this folder be written?
        except Timeout:
            raise ValueError(f"{self.folder}: another process is training in this folder") from None
        except OSError as e:
            raise OSError(f"run.output_dir: cannot write to {self.folder}: {e.strerror}") from e
        try:
            self.open_folder(run["resume"])
            if self.tensorboard:
                self.tensorboard.open(self.folder / "tensorboard", self.step)
                self.hooks.append(self.tensorboard)
        except BaseException:
            self.lock.release()
            raise

        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        batch = config["data"]["target_batch_size"]
        say(f"device   {self.device} | {str(self.dtype)[6:]} ({why}) | "
              f"{torch.get_num_threads()} CPU threads")
        say(f"model    {config['model']['name']} | {trained:,} parameters | "
              f"{batch} x {config['model']['block_size']} = "
              f"{batch * config['model']['block_size']:,} tokens per step | "
              f"to step {run['max_steps']:,}")
        if run["expected_loss"]:
            say(f"expect   a validation loss near {run['expected_loss']:.2f}")
        say(f"folder   {self.folder}")

    def open_folder(self, resume: bool):
        for leftover in self.folder.glob("*.tmp"):  # of a process that was killed while writing
            leftover.unlink()
        if resume:
            self.resume()
        elif self.checkpoints():
            raise ValueError(f"{self.folder} already holds a run: "
                             f"add --resume to go on, or --name=ANOTHER")
        else:
            (self.folder / "metrics.jsonl").write_text("")
        self.metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")

    # one line per event, the same numbers for a reader, a file and the hooks

    def emit(self, event: str, line: str, **payload):
        if event != "step" or not self.bar:     # the bar shows these
            say(f"{event:<8} {line}")
        payload = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                   for k, v in payload.items()}     # JSON has no infinity
        try:
            self.metrics.write(json.dumps({"event": event, **payload}) + "\n")
            self.metrics.flush()
        except OSError as e:
            raise TrainingError(f"cannot write {self.metrics.name}: {e.strerror}") from e
        for hook in self.hooks:
            hook(event, payload)

    # checkpoints

    def checkpoints(self) -> list[Path]:
        return sorted((p for p in self.folder.glob("step_*.pt")
                       if re.fullmatch(r"step_\d{12}\.pt", p.name)), reverse=True)

    def save(self):
        """Write step_<step>.pt, point latest.json at it,
        and delete what checkpoint.keep_last does not keep."""
        self.refuse_not_finite()
        path = self.folder / f"step_{self.step:012d}.pt"
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "step": self.step, "position": self.position, "tokens": self.tokens,
            "best": self.best, "last_loss": float(self.last_loss), "random": random_state(),
            "config": self.config,
            "coordinator": self.coordinator.state_dict() if self.coordinator else None,
        }
        write_atomically(path, lambda f: torch.save(state, f))
        latest = json.dumps({"step": self.step, "path": path.name})
        write_atomically(self.folder / "latest.json", lambda f: f.write(latest.encode()))
        for old in self.checkpoints()[self.config["checkpoint"]["keep_last"]:]:
            old.unlink()
        self.emit("checkpoint", f"{self.progress()} | {path}", step=self.step, path=path.name)

    def resume(self):
        """Continue from the newest checkpoint that is whole, saying which ones are not."""
        state = None
        for path in self.checkpoints():
            try:
                state = read_checkpoint(path)
                break
            except ValueError as e:
                # or it would pass for the newest
                path.rename(path.with_name(path.name + ".damaged"))
                say(f"notice   {e}; set aside, trying the one before")
        if state is None:
            raise FileNotFoundError(f"--resume: no usable checkpoint in {self.folder}; "
                                    f"start without --resume")
        ours = {k: tuple(v.shape) for k, v in self.model.state_dict().items()}
        theirs = {k: tuple(v.shape) for k, v in state["model"].items()}
        if ours != theirs:
            k = next(k for k in sorted(ours.keys() | theirs.keys()) if ours.get(k) != theirs.get(k))
            source = state["config"]["model"].get("init_from")
            raise ValueError(f"{path} is of another model: {k} is {theirs.get(k, 'missing')} "
                             f"there, {ours.get(k, 'missing')} here"
                             + f"; it was begun with --model.init_from={source}" * bool(source))
        self.model.load_state_dict(state["model"])
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError(f"{path} was written with another optimizer.name")
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            for group, now in zip(saved["param_groups"], optimizer.param_groups):
                # the settings of today, the state of then
                group.update({k: v for k, v in now.items() if k != "params"})
            optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        self.last_loss = torch.tensor(state["last_loss"])
        self.step, self.position, self.tokens, self.best = (
            state[k] for k in ("step", "position", "tokens", "best"))
        set_random_state(state["random"])
        if self.coordinator and state["coordinator"]:
            self.coordinator.load_state_dict(state["coordinator"])
        for section, values in self.config.items():
            for key, value in values.items():
                before = state["config"].get(section, {}).get(key, value)
                if before != value and key != "resume":
                    say(f"notice   {section}.{key} was {before} in the checkpoint "
                          f"and is {value} now")
        self.forget_after(self.step)
        say(f"resume   from {path} at step {self.step:,}")

    def forget_after(self, step: int):
        """Drop the lines of metrics.jsonl that steps to come will write again,
        and a line cut off by a kill."""
        path, kept = self.folder / "metrics.jsonl", []
        for line in (path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
                     if path.exists() else []):
            with contextlib.suppress(ValueError, AttributeError, TypeError):
                if json.loads(line).get("step", 0) <= step and line.endswith("\n"):
                    kept.append(line)
        kept.append(json.dumps({"event": "resume", "step": step,
                                "path": f"step_{step:012d}.pt"}) + "\n")
        write_atomically(path, lambda f: f.write("".join(kept).encode()))

    # the work

    def loss(self, model, batch) -> torch.Tensor:
        return batch_loss(model, self.model, batch, self.device, self.dtype)

    def forward_backward(self, microbatches) -> torch.Tensor:
        """Accumulate the gradients of the mean loss of the microbatches,
        which is returned, still on the device."""
        total = torch.zeros((), device=self.device)
        try:
            for batch in microbatches:
                loss = self.loss(self.forward, batch) / len(microbatches)
                self.scaler.scale(loss).backward()
                total += loss.detach()
        except Exception as e:
            if self.forward is self.model:
                raise
            say(f"notice   torch.compile failed, going on without it: "
                  f"{type(e).__name__}: {one_line(e)[:200]}")
            self.forward = self.model
            self.zero_grad()
            return self.forward_backward(microbatches)
        return total

    def learning_rate(self) -> float:
        def coordinated(name, otherwise):
            return getattr(self.coordinator, name, lambda step: otherwise)(self.step)
        return (self.config["optimizer"]["lr"] * coordinated("lr_scale", 1.0)
                * lr_factor(coordinated("schedule_step", self.step), self.config["scheduler"]))

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> float:
        return mean_loss(self.model, self.val_data, self.config, self.device, self.dtype)

    def progress(self) -> str:
        return (f"{self.step:>{len(str(self.config['run']['max_steps']))}}/"
                f"{self.config['run']['max_steps']}")

    def eval_and_keep_best(self):
        self.refuse_not_finite()
        with self.saving_on_trouble():
            val_loss = self.evaluate()
        if not math.isfinite(val_loss):
            raise TrainingError(f"step {self.step}: the validation loss is {val_loss}")
        if val_loss < self.best["val_loss"]:
            self.best = {"step": self.step, "val_loss": val_loss}
            state = {"model": self.model.state_dict(), "config": self.config, **self.best}
            write_atomically(self.folder / "best.pt", lambda f: torch.save(state, f))
        line = (f"{self.progress()} | val {val_loss:.4f} | "
                f"best {self.best['val_loss']:.4f} @ {self.best['step']}")
        per_token, payload = getattr(self.val_data, "bytes_per_token", None), {}
        if per_token and per_token != 1:    # comparable between tokenizers, and with bytes
            payload = {"val_loss_per_byte": val_loss / per_token}
            line += f" | {val_loss / per_token:.4f} per byte"
        self.emit("eval", line, step=self.step, val_loss=val_loss, **payload)
        if self.config["run"]["sample"]:
            try:
                self.print_sample(self.step == self.config["run"]["max_steps"])
            except TrainingError as e:      # the run itself is well
                say(f"notice   {e}")

    def print_sample(self, whole: bool):
        """Continue run.sample, by at most 100 tokens if not the whole. Raises TrainingError."""
        count = self.config["sample"]["tokens"]
        try:
            self.text = self.text or Text(self.config)
            prompt = self.text.encode(self.config["run"]["sample"] or "\n")
            if max(prompt) >= self.config["model"]["vocab_size"]:
                raise ValueError("the prompt is outside the vocabulary")
            ids = generate(self.model, prompt, self.config, count if whole else min(100, count))
            text = self.text.decode(ids)
        except Exception as e:  # a model that wants labels, say
            raise TrainingError(f"no sample: {type(e).__name__}: {one_line(e)}") from e
        say(f"sample   {'-' * 60}\n{text}\n{'-' * 69}")

    def refuse_not_finite(self):
        if self.not_finite.item():
            newest = next((str(p) for p in self.checkpoints()), "none yet")
            raise TrainingError(f"the loss or a gradient is not finite near step {self.step + 1}: "
                                f"lower optimizer.lr, or look at the data; "
                                f"the last good checkpoint is {newest}")

    @contextlib.contextmanager
    def saving_on_trouble(self):
        """Bad data ends the run in one line, with the work so far saved."""
        try:
            yield
        except (TrainingError, OSError) as e:
            if self.step:
                self.save()
            # out of a DataLoader process it comes with its traceback as text
            last = (str(e).strip().splitlines() or [""])[-1]
            raise TrainingError(re.sub(r"^\w[\w.]*Error: ", "", last) or type(e).__name__) from e

    def train(self):
        """Run to max_steps, or to a signal, and evaluate and save there. Raises TrainingError."""
        with self.catching_signals():
            try:
                self.loop()
            finally:
                if self.tensorboard:
                    self.tensorboard.writer.close()
                self.lock.release(force=True)

    @contextlib.contextmanager
    def catching_signals(self):
        """The first Ctrl-C or SIGTERM ends the run after the step under way,
        the second one ends it at once."""
        main = threading.current_thread() is threading.main_thread()
        before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)} if main else {}

        def restore():
            for number, handler in before.items():
                signal.signal(number, handler)

        def stop(number, _):
            self.stop_signal = signal.Signals(number).name
            restore()

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            restore()

    def loop(self):
        if self.coordinator:
            self.coordinator.start(self)    # may move to another step
        first = self.step
        data = batches(self.train_data, self.config, self.position, self.device)
        with (contextlib.closing(data),
              bar(self.step, self.config["run"]["max_steps"]) as self.bar):
            self.steps(data)
        self.bar = None
        if self.coordinator:
            self.coordinator.finish(self)
        if self.step == first and not self.stop_signal:
            say(f"done     already at step {self.step} of {self.config['run']['max_steps']}")
            return
        if self.val_data is not None and not self.stop_signal:
            self.eval_and_keep_best()
        self.save()
        if self.stop_signal:
            say(f"stop     {self.stop_signal}: the state is saved, "
                  f"--resume goes on from step {self.step}")

    def steps(self, data):
        run, c, coordinator = self.config["run"], self.config, self.coordinator
        params = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        first, paused = self.step, 0.0      # paused: time in eval and save, which is not training
        began = window = time.perf_counter()
        window_steps = window_tokens = 0
        self.model.train()
        while self.step < run["max_steps"] and not self.stop_signal:
            lr = self.learning_rate()
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
            with self.saving_on_trouble():
                microbatches = [as_batch(next(data)) for _ in range(c["data"]["accumulation"])]
            loss = self.forward_backward(microbatches)
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(params, c["optimizer"]["grad_clip"] or math.inf)
            self.not_finite |= ~torch.isfinite(loss if self.scaler.is_enabled() else loss + norm)
            # elsewhere it would be a sync: checked before log, eval and save
            if self.device.type == "cpu":
                self.refuse_not_finite()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
            self.zero_grad()
            self.last_loss = loss
            self.step += 1
            self.position += c["data"]["target_batch_size"]
            tokens = sum(int(b["attention_mask"].sum()) if "attention_mask" in b
                         else b["input_ids"].numel() for b in microbatches)
            self.tokens += tokens
            if coordinator:
                coordinator.after_step(self)
            if self.bar:
                self.bar.update(self.step - self.bar.n)     # a coordinator may have moved it

            window_steps, window_tokens = window_steps + 1, window_tokens + tokens
            if self.step % c["logging"]["every_steps"] == 0 or self.step == run["max_steps"]:
                self.refuse_not_finite()    # waits for the device: the clock below is right
                now = time.perf_counter() - paused
                spent, elapsed, rate = (
                    (now - window) / window_steps, now - began, window_tokens / (now - window))
                eta = duration((run["max_steps"] - self.step) * spent)
                if self.bar:
                    self.bar.set_description_str(f"loss {loss.item():.4f} | {rate:,.0f} tok/s | "
                                                 f"eta {eta}", refresh=False)
                self.emit("step", f"{self.progress()} | loss {loss.item():.4f} | lr {lr:.2e} | "
                                  f"norm {norm.item():.2f} | {spent * 1e3:,.0f} ms | "
                                  f"{rate:,.0f} tok/s | eta {eta}",
                          step=self.step, loss=loss.item(), lr=lr, grad_norm=norm.item(),
                          tokens=self.tokens, tokens_per_s=rate, seconds=elapsed)
                window, window_steps, window_tokens = now, 0, 0
            elif self.step - first == WARM_STEPS:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                window, window_steps, window_tokens = time.perf_counter() - paused, 0, 0

            if self.step < run["max_steps"]:
                pause = time.perf_counter()
                if (run["eval_every"] and self.step % run["eval_every"] == 0
                        and self.val_data is not None):
                    self.eval_and_keep_best()
                if (c["checkpoint"]["every_steps"]
                        and self.step % c["checkpoint"]["every_steps"] == 0):
                    self.save()
                paused += time.perf_counter() - pause


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"
