"""
Data, device, precision, optimizer, checkpoints and THE LOOP.
Needs torch and numpy; knows nothing of any model.

    config = {"run": {"name": "mine", "max_steps": 200}, "data": {"path": "texts/"}}
    trainer = Trainer(model, config, *build_data(config))     # or your own Dataset or DataLoader
    trainer.train()

A model is any nn.Module called as model(input_ids, labels, attention_mask) that returns a loss, a
tuple, a dict or only logits. `config` is a nested dict; what it leaves out is in DEFAULTS. A
coordinator, if there is one, is called between the steps: this is where a swarm hooks in. One
process, one device: no DDP, no sharding. What the user can put right is raised as a ValueError, an
OSError or a TrainingError, with a message of one line.
"""
import bisect
import codecs
import contextlib
import ctypes
import functools
import gzip
import hashlib
import inspect
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch.utils.data import DataLoader, Dataset, IterableDataset

# What a config leaves out. config.py explains each key; a test holds the two equal.
DEFAULTS = dict(
    run=dict(name="small", seed=1337, device="auto", precision="auto", compile=False,
             gradient_checkpointing=False, max_steps=1000, resume=False, best=False,
             output_dir="runs", eval_every=100, eval_batches=20, sample="", expected_loss=0.0),
    model=dict(name="reference_transformer", init_from="", vocab_size=256, block_size=256),
    data=dict(path="stdlib", val_path="", tokenizer="", text_column="text", micro_batch_size=16,
              target_batch_size=16, num_workers=0, prefetch_factor=2, pin_memory="auto"),
    optimizer=dict(name="adamw", lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
                   grad_clip=1.0, fused=True),
    scheduler=dict(name="cosine", warmup_steps=100, max_steps=0, min_lr_ratio=0.1),
    checkpoint=dict(every_steps=250, keep_last=2),
    logging=dict(every_steps=10, tensorboard=False),
    sample=dict(tokens=400, temperature=0.8, top_k=0, top_p=1.0),
    distributed=dict(node_id=""),
)
IGNORE = -100      # a label that does not count
WARM_STEPS = 3     # first steps of an invocation, left out of the token rate
SKIPPED = 100      # updates in a row that fp16 may skip before the run stops


class TrainingError(RuntimeError):
    """What stops a run and is not a bug:
    a loss that is not finite, a full disk, a token out of range."""


def fill_defaults(config: dict) -> dict:
    """Add to a config, in place, the sections and keys that it leaves out."""
    for section, values in DEFAULTS.items():
        config[section] = {**values, **config.get(section, {})}
    data, scheduler = config["data"], config["scheduler"]
    if data["target_batch_size"] % data["micro_batch_size"]:
        raise ValueError(f"data.target_batch_size={data['target_batch_size']} is not a multiple of "
                         f"data.micro_batch_size={data['micro_batch_size']}")
    data["accumulation"] = data["target_batch_size"] // data["micro_batch_size"]
    scheduler["max_steps"] = scheduler["max_steps"] or config["run"]["max_steps"]
    return config


def say(line: str):
    """Print a line at once. A run outlives its output: what a terminal cannot show becomes "?",
    and once the terminal or the pipe is gone all that is printed goes nowhere."""
    try:
        print(line, flush=True)
    except UnicodeEncodeError as e:
        print(line.encode(e.encoding, "replace").decode(e.encoding), flush=True)
    except (OSError, ValueError):       # ValueError: it was closed
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())   # for all that still holds the old one, too
            os.close(nowhere)


def one_line(e: BaseException) -> str:
    return " ".join(str(e).split()) or type(e).__name__

# ---- data: a pure function of (seed, node id, counter)


def hash64(*parts) -> int:
    """64 well-mixed bits of the parts, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def permute(i: int, n: int, key: int) -> int:
    """Where item i of n lands in the permutation `key`: computed, so no epoch is ever stored.

    A four-round Feistel network on the next even number of bits. A result outside n goes through
    it again until it is inside (Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
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


class Part(NamedTuple):
    """Tokens in a file."""
    path: str
    dtype: str      # numpy's name of it
    offset: int     # bytes before the first token
    count: int


class Tokens:
    """Token files end to end as one array. No file stays open or in memory.

    files: {name: path} of the user's, for the hash `digest` and the list `paths`; documents: how
    many are known to be in them; size: bytes of text behind the tokens, 0 = not known.
    """

    def __init__(self, parts: list[Part], files={}, documents=0, size=0):
        self.parts = [part for part in parts if part.count]
        self.starts = [0, *itertools.accumulate(part.count for part in self.parts)]
        self.paths = list(files.values())
        sizes = [(name, os.path.getsize(f)) for name, f in files.items()]
        self.digest = f"{hash64(sizes):016x}"
        self.bytes_per_token = size / max(1, len(self)) or None
        self.documents, self.size = documents, size

    @property
    def summary(self) -> str:
        """What the files hold, for the data line."""
        kinds = sorted(map(kind_of, self.paths))
        counts = [f"{kinds.count(kind):,} {kind}" for kind in dict.fromkeys(kinds)]
        parts = [f"files: {', '.join(counts)}"]
        if self.documents:
            parts.append(f"documents: {self.documents:,}")
        if self.size == len(self):      # a byte is a token
            return " | ".join([*parts, f"bytes: {self.size:,}"])
        if self.size:
            parts.append(f"bytes: {self.size:,}, {self.bytes_per_token:.2f} per token")
        return " | ".join([*parts, f"tokens: {len(self):,}"])

    def __len__(self):
        return self.starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """The tokens start to start + count, (count,), in the integer type of their files."""
        found, k = [], bisect.bisect_right(self.starts, start) - 1
        while count:
            path, dtype, offset, length = self.parts[k]
            first = start - self.starts[k]
            take = min(count, length - first)
            offset += first * np.dtype(dtype).itemsize
            found.append(np.fromfile(path, dtype, take, offset=offset))
            if len(found[-1]) != take:
                raise OSError(f"{path} has become shorter since the run began")
            start, count, k = start + take, count - take, k + 1
        return np.concatenate(found)


class Synthetic:
    """Endless arithmetic sequences of 64 tokens. Start and stride of each are random, so only the
    context predicts the next token. It has what Tokens has."""
    paths, digest, summary, bytes_per_token = (), "synthetic", "endless", None

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def __len__(self):
        return 1 << 40

    def read(self, start: int, count: int) -> np.ndarray:
        position = np.arange(start, start + count, dtype=np.uint64)
        h = (position // 64 + 1) * np.uint64(0x9E3779B97F4A7C15)
        h = (h ^ h >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        first, stride = h >> np.uint64(32), h >> np.uint64(40) & np.uint64(7)
        return (first + position % 64 * stride) % self.vocab_size


class Windows(Dataset):
    """Item i is a window of block_size tokens and its labels: {"input_ids": (T,), "labels": (T,)},
    both int64. It depends on (run.seed, node_id, i) alone.

    Training: epoch after epoch, each in its own order and with its own offset. Validation (count
    given): the same `count` windows, spread over all tokens of `span`. `fingerprint` goes into a
    checkpoint, for data_change(). Raises ValueError if the tokens do not fill one window, and
    TrainingError for an item with a token outside the vocabulary.
    """

    def __init__(self, source, span: range, config: dict, count: int = 0):
        self.source, self.start, self.tokens, self.count = source, span.start, len(span), count
        self.vocab_size = config["model"]["vocab_size"]
        self.block_size = config["model"]["block_size"]
        self.key = (config["run"]["seed"], config["distributed"]["node_id"])
        self.bytes_per_token = source.bytes_per_token
        self.windows = (self.tokens - 1) // self.block_size
        self.fingerprint = {"tokens": len(source), "first": span.start, "windows": self.windows,
                            "digest": source.digest}
        if self.windows < 1:
            key = "val_path" if count and config["data"]["val_path"] else "path"
            raise ValueError(f"data.{key}={config['data'][key]} is too short: {self.tokens:,} "
                             f"tokens do not fill one window of model.block_size={self.block_size}")

    def __len__(self):
        return self.count or self.windows

    def __getitem__(self, i: int) -> dict:
        if self.count:
            first = i * self.windows // self.count * self.block_size
        else:
            epoch, i = divmod(i, self.windows)
            # window borders move from epoch to epoch
            shift = hash64(*self.key, epoch, "shift") % self.block_size
            first = permute(i, self.windows, hash64(*self.key, epoch)) * self.block_size + shift
            first %= self.tokens - self.block_size
        # one token more: labels are the inputs, one further
        tokens = self.source.read(self.start + first, self.block_size + 1).astype(np.int64)
        for token in (tokens.min(), tokens.max()):
            if not 0 <= token < self.vocab_size:
                raise TrainingError(f"token {token} in the data is outside "
                                    f"model.vocab_size={self.vocab_size}")
        tokens = torch.from_numpy(tokens)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def data_change(before: dict, now: dict) -> str:
    """What differs between two fingerprints of Windows, as a sentence. "" if nothing does, or if
    one of them is not known."""
    if not before or not now or before == now:
        return ""
    changed = ", ".join(f"{key} {before.get(key)} -> {value}" for key, value in now.items()
                        if before.get(key) != value)
    return f"the data has changed ({changed}): the order of the windows is a new one from here on"

# ---- files: what data.path names, and the text in them

BLOCK = 1 << 16     # bytes of a text that are read and tokenized at a time
# What a file holds, by its name; all others hold text. A dataset repo may have the same rows in
# several kinds of files: the first kind of these counts.
KINDS = {"parquet": r"\.parquet$", "jsonl": r"\.(jsonl|ndjson|json)(\.gz)?$",
         "csv": r"\.(csv|tsv)(\.gz)?$", "text": r"\.txt(\.gz)?$", "token": r"\.(bin|npy)$"}
# What lies beside the data in such a repo, and what it calls its splits.
NOT_DATA = re.compile(r"(^|/)(\.|(readme|license|dataset_infos?|dataset_dict)\b)", re.I)
SPLITS = {"train": "train", "training": "train", "validation": "validation", "test": "test",
          "valid": "validation", "val": "validation", "dev": "validation", "eval": "test"}
WANTED = ("wanted are texts in UTF-8, .jsonl or .parquet, or tokens in .bin or .npy "
          "(a glob such as folder/*.txt leaves the rest out)")
# First bytes that give a refusal its name. All else is refused for a zero byte or bad UTF-8.
MAGIC = {
    rb"\xff\xfe|\xfe\xff": "UTF-16 text (iconv -f UTF-16 -t UTF-8 converts it)",
    rb"\x1f\x8b": "gzip data in a file that is not named .gz",
    rb"PK\x03\x04": "a zip archive, as are .npz, .docx and PyTorch's .pt",
    rb"\x89PNG|\xff\xd8\xff": "an image", rb"%PDF-": "a PDF",
    rb"\x80[\x02-\x05]": "a Python pickle", rb".{4}\0{4}\{": "a file of model weights",
}


def kind_of(path: str, otherwise="text") -> str:
    """parquet, jsonl, csv, text or token, by the name."""
    return next((kind for kind, name in KINDS.items() if re.search(name, path, re.I)), otherwise)


def walk(folder: str, depth: float, seen: set):
    """Yield every file at most `depth` levels below a folder, but no hidden file and no Python
    cache. Links are followed. No real folder is read that is in `seen`, so that loops end."""
    real = os.path.realpath(folder)
    if real in seen or not depth:
        return
    seen.add(real)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith(".") or name == "__pycache__":
            continue
        if os.path.isdir(path):
            yield from walk(path, depth - 1, seen)
        else:
            yield path


def find_local(path: str, own: list[str]) -> dict[str, str]:
    """{name: path} for a file, a folder or a glob, without the folders `own`. They hold what the
    run itself writes, so they count only if `path` leads into them."""
    from fsspec.utils import glob_translate     # comes with torch
    path = Path(os.path.expanduser(path))
    # the longest part that exists as written, so "texts [v2]/*.txt" works
    root = next(p for p in (path, *path.parents) if p.is_dir())
    top, pattern = os.path.realpath(root), path.relative_to(root).as_posix()
    seen = {real for real in map(os.path.realpath, own) if not f"{top}/".startswith(f"{real}/")}
    if path.is_file():
        found = [str(path)]
    elif path == root:
        found = walk(str(root), math.inf, seen)
    else:
        depth = math.inf if "**" in pattern else pattern.count("/") + 1
        wanted = re.compile(glob_translate(pattern))
        found = [f for f in walk(str(root), depth, seen)
                 if wanted.match(Path(f).relative_to(root).as_posix())]
    # by real path: a link to a file that is there anyway adds nothing
    once = {os.path.realpath(f): f for f in sorted(found, reverse=True) if os.path.isfile(f)}
    files = {Path(os.path.relpath(f, root)).as_posix(): f for f in once.values()}
    return dict(sorted(files.items()))


def split_of(name: str) -> str:
    """The split in a path such as data/train-00000-of-00002.parquet, or ""."""
    words = re.findall("[a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def choose(names: list[str], wanted: tuple) -> list[str]:
    """The data files of a dataset repo, of the first split in `wanted` that it has."""
    found = [name for name in names if kind_of(name, "") and not NOT_DATA.search(name)]
    splits = {split_of(name) for name in found} - {""}
    split = next((s for s in wanted if s in splits), "")
    if splits and not split:
        raise ValueError(f"there is no {wanted[0]} split, only {', '.join(sorted(splits))}: "
                         f"add the file you want to the path")
    found = [name for name in found if split_of(name) == split]
    kind = min(map(kind_of, found), key=list(KINDS).index, default="")
    found = [name for name in found if kind_of(name) == kind]
    folders = sorted({os.path.dirname(name) for name in found})
    if split and len(folders) > 1:      # such as en/train.jsonl and de/train.jsonl
        raise ValueError(f"there are {len(folders)} configurations ({', '.join(folders)[:200]}): "
                         f"add one to the path, or a glob")
    return found


def find_on_hub(path: str, key: str) -> dict[str, str]:
    """{name: local copy} for hf://datasets/user/name, a folder or a file in it, or a glob."""
    from huggingface_hub import HfFileSystem, hf_hub_download   # only here: no network otherwise
    try:
        fs = HfFileSystem()
        whole = fs.isdir(path)
        root = fs.resolve_path(path).path_in_repo + "/" if whole else ""
        found = [fs.resolve_path(f) for f in (fs.find(path) if whole else fs.glob(path))]
        found = {f.path_in_repo.removeprefix(root): f for f in found}
        names = sorted(found)
        if whole:   # a validation set may be in the same repo
            names = choose(names, ("train",) if key == "path" else ("validation", "test"))
            say(f"notice   {path}: reading {len(names):,} of its {len(found):,} files")
        return {name: hf_hub_download(
            found[name].repo_id, found[name].path_in_repo, repo_type=found[name].repo_type,
            revision=found[name].revision) for name in names}
    except Exception as e:  # the network has many ways to fail
        raise OSError(f"data.{key}={path} cannot be read: {one_line(e)[:300]}") from e


def find_stdlib() -> dict[str, str]:
    """{name: path} of Python's own library. It is shuffled by name, so that the last tenth, which
    is held out, is like the rest."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    names = [f.relative_to(root) for f in root.rglob("*.py")]
    names = [name.as_posix() for name in names if not skip.intersection(name.parts)]
    return {name: str(root / name) for name in sorted(names, key=hash64)}


def find_files(config: dict, key: str) -> dict[str, str]:
    """{name: path} of the files behind data.path or data.val_path (`key`), in an order that does
    not depend on the machine. A name is the path within the folder."""
    path, run = config["data"][key], config["run"]
    if path == "stdlib":
        return find_stdlib()
    if path.startswith("hf://"):
        files = find_on_hub(path, key)
    else:
        own = [run["output_dir"], run.get("export"), config["distributed"].get("hub")]
        files = find_local(path, [f.removeprefix("file://") for f in own if f]) if path else {}
    if not files:
        raise FileNotFoundError(f"data.{key}={path}: nothing there; "
                                f"give a file, a folder, a glob, stdlib or synthetic")
    return files


def open_bytes(path: str):
    """A file open for reading bytes, unpacked if it is a .gz."""
    f = gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb")
    for magic, what in MAGIC.items():
        if re.match(magic, f.peek(16), re.S):
            f.close()
            raise ValueError(f"this is {what}; {WANTED}")
    return f


def cut(text: str) -> int:
    """Where to cut a long text so that the tokens of its parts are those of the whole: in front of
    the last space (if there is none, line end) that follows a letter or sign. No usual tokenizer
    has a token across such a place. Some have one across the end of a line: blank lines, CRLF."""
    for mark in (" ", "\n"):
        # also not behind what may be a special token: some put a space behind those
        if found := re.match(rf".*[^\s>\]](?={mark})", text, re.S):
            return found.end()
    return len(text)


def read_text(path: str):
    """Yield (text, whether it is the last) of a file, in blocks that can be tokenized alone."""
    decoder, done, block, rest = codecs.getincrementaldecoder("utf-8-sig")(), 0, None, ""
    with open_bytes(path) as f:
        while block != b"":
            block = f.read(BLOCK)
            if b"\0" in block:
                raise ValueError(f"byte {done + block.index(0):,} is zero: not text; {WANTED}")
            done += len(block)
            try:
                rest += decoder.decode(block, final=not block)
            except UnicodeDecodeError as e:     # e.object: what was left before, and the block
                at = done - len(e.object) + e.start
                raise ValueError(f"not UTF-8 text at byte {at:,}: {e.reason}; {WANTED}") from None
            if len(rest) >= BLOCK:
                at = cut(rest)
                yield rest[:at], False
                rest = rest[at:]
    yield rest, True


def read_json(path: str, column: str):
    """Yield the row in each line of a file. An empty line is a row without a text."""
    with open_bytes(path) as f:
        for line in f:
            try:
                yield json.loads(line.decode("utf-8-sig")) if line.strip() else {column: None}
            except (ValueError, RecursionError):
                yield None      # row_text() refuses it


def read_parquet(path: str, column: str):
    """Yield the rows of a .parquet file, with one column. Some are in memory at a time."""
    try:
        from pyarrow import parquet     # only here: an optional package
    except ImportError:
        raise ValueError("this needs a package: pip install pyarrow") from None
    # keep: a buffer, and no pre_buffer, or a whole row group is held in memory
    with parquet.ParquetFile(path, buffer_size=BLOCK, pre_buffer=False) as f:
        names = f.schema_arrow.names
        if column not in names:
            yield dict.fromkeys(names)      # row_text() refuses it with the names
        for rows in f.iter_batches(64, columns=[column]):
            yield from rows.to_pylist()


def row_text(row: dict, column: str) -> str:
    """The text of a row, "" if it has none."""
    if not isinstance(row, dict):
        raise ValueError('no JSON object in UTF-8; wanted is one {"text": ...} in each line')
    if column not in row:
        raise ValueError(f"no column {column!r}; there are {', '.join(row)[:200]}: "
                         f"--data.text-column=NAME")
    text = "" if row[column] is None else row[column]
    if not isinstance(text, str):
        raise ValueError(f"{column!r} is of type {type(text).__name__}, not text")
    text.encode()       # half of a surrogate pair is no text
    return text


def documents(path: str, column: str):
    """Yield (text, whether a document ends with it) for a file. A row is a document, a file of
    plain text is one, in blocks that can be tokenized one by one."""
    kind, place = kind_of(path), path
    try:
        if kind == "csv":
            raise ValueError('convert it to .jsonl, one {"text": ...} a line')
        if kind == "text":
            yield from read_text(path)
            return
        place = f"{path}, row 1"
        rows = read_parquet(path, column) if kind == "parquet" else read_json(path, column)
        for number, row in enumerate(rows, 2):
            if text := row_text(row, column):
                yield text, True
            place = f"{path}, row {number:,}"   # what fails next is there
    except Exception as e:      # a damaged file has many ways to fail
        raise ValueError(f"{place}: {one_line(e)[:300]}") from e


def token_file(path: str, vocab_size: int = 0) -> Part:
    """The tokens in a .npy row of integers, or in a .bin of nanoGPT (uint16) or llm.c (with its
    header)."""
    if path.lower().endswith(".npy"):
        try:
            array = np.load(path, mmap_mode="r")
        except Exception as e:      # numpy reads the header as Python text
            raise ValueError(f"{path} is no .npy file, or cut off: {one_line(e)}") from None
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(f"{path} must hold one row of integers")
        return Part(path, array.dtype.str, array.offset, len(array))
    size = os.path.getsize(path)
    header = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0]       # llm.c's, if it has one
    if header[0] == 0x04034B50:
        raise ValueError(f"{path} is a zip archive, as are PyTorch's weights; {WANTED}")
    dtype, offset = {20240520: ("<u2", 1024), 20240801: ("<u4", 1024)}.get(header[0], ("<u2", 0))
    count, rest = divmod(size - offset, int(dtype[2]))
    if rest or offset and count != header[2]:
        raise ValueError(f"{path} is cut off, or no token file: {size} bytes are no whole number "
                         f"of tokens")
    if not offset and vocab_size > 1 << 16:
        raise ValueError(f"{path} has no header, so its tokens are uint16, but model.vocab_size="
                         f"{vocab_size} is above 65,536: write a .npy, or llm.c's header")
    return Part(path, dtype, offset, count)

# ---- tokens: text becomes numbers

BATCH = 1 << 20     # characters that are tokenized together, in parallel: 200 MiB, 400 of Chinese
LEAD = "\x01"       # stands before a block from inside a text; no token joins it with text
BREAK = b"\n\n"     # between documents, for a model of bytes
SEPARATORS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")  # and for one of tokens
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
BESIDE = ["special_tokens_map.json", "tokenizer_config.json", "added_tokens.json",
          "chat_template.jinja"]


def read_tokenizer(name: str) -> dict[str, bytes]:
    """{name: content} of the tokenizer.json of a data.tokenizer, and of those BESIDE it."""
    path = Path(name).expanduser()
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        from huggingface_hub import snapshot_download
        try:
            path = Path(snapshot_download(name, allow_patterns=["tokenizer.json", *BESIDE]))
        except Exception as e:  # the network has many ways to fail
            raise OSError(f"data.tokenizer={name} is no file here, and the Hub does not give it: "
                          f"{one_line(e)[:200]}") from None
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"data.tokenizer={name}: no tokenizer.json there; "
                                f"give one, a folder that holds it, or user/name on the Hub")
    beside = [p for p in map(path.with_name, BESIDE) if p.is_file()]
    return {"tokenizer.json": path.read_bytes(), **{p.name: p.read_bytes() for p in beside}}


class Text:
    """Text as token ids and back: by data.tokenizer, or as bytes if it is ""."""

    def __init__(self, config: dict):
        self.tokenizer, self.files = None, {}   # of the package tokenizers; {name: content}
        self.size, self.eos = 256, None         # largest id + 1; the id that ends a text
        self.special = {}                       # {"eos_token": "</s>"} and the like
        if name := config["data"]["tokenizer"]:
            self.files = read_tokenizer(name)
            try:
                self.load()
            except ImportError:
                raise ValueError(f"data.tokenizer={name} needs: pip install tokenizers") from None
            except Exception as e:  # tokenizers has many ways to fail
                raise ValueError(f"data.tokenizer={name} cannot be used: "
                                 f"{one_line(e)[:200]}") from None

    def load(self):
        # else it warns when a DataLoader forks, which is harmless: those processes only read
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        from tokenizers import Tokenizer    # only here: bytes need no package
        self.tokenizer = Tokenizer.from_buffer(self.files["tokenizer.json"])
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab()
        self.size = 1 + max(vocab.values())
        # The end of a text goes by its usual names, or by what the files say: the last one counts.
        named = [("eos_token", name) for name in reversed(SEPARATORS)]
        for file in BESIDE[:2]:
            named += json.loads(self.files.get(file, b"{}")).items()
        for kind, token in named:
            name = token.get("content") if isinstance(token, dict) else token
            if kind in SPECIAL and isinstance(name, str) and name in vocab:
                self.special[kind] = name
        self.eos = vocab.get(self.special.get("eos_token"))

    def encode(self, text: str) -> list[int]:
        """With the token that starts a text, if the tokenizer puts one there."""
        return self.tokenizer.encode(text).ids if self.tokenizer else list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Ids that only pad the vocabulary have no text."""
        if self.tokenizer:
            return self.tokenizer.decode(ids, skip_special_tokens=False)
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def encode_blocks(blocks, text: Text):
    """Yield (token ids, bytes of text, whether a document ends) for (text, whether one ends), with
    a separator behind each document."""
    if not text.tokenizer:
        for block, end in blocks:
            content = block.encode()
            yield np.frombuffer(content + BREAK if end else content, "u1"), len(content), end
        return
    batch, size, inside = [], 0, False
    for block, end in blocks:
        batch.append((block, inside, end))
        inside = not end        # the next one continues this document
        size += len(block) + 256    # a short one takes memory, too
        if size >= BATCH:
            yield from encode_batch(batch, text)
            batch, size = [], 0
    yield from encode_batch(batch, text)


def encode_batch(batch: list, text: Text):
    """The work of encode_blocks() on some blocks, in parallel. One from inside a document goes
    behind a LEAD: some tokenizers put a space in front of what they take for a whole text."""
    def encode(*parts):
        found = text.tokenizer.encode_batch(parts, add_special_tokens=False)
        return [each.ids for each in found]

    try:
        head, *found = encode(LEAD, *(LEAD + block if inside else block
                                      for block, inside, _ in batch))
        for (block, inside, end), ids in zip(batch, found):
            if inside and ids[:len(head)] == head:
                ids = ids[len(head):]
            elif inside:        # one token holds the lead and some of the text
                ids, = encode(block)
            if end and text.eos is not None and ids[-1:] != [text.eos]:
                ids.append(text.eos)
            yield ids, len(block.encode()), end
    except Exception as e:  # a character that it has no token for, say
        raise ValueError(f"data.tokenizer fails on the text: {one_line(e)[:200]}") from None


def write_tokens(f, files: list[str], column: str, text: Text) -> dict:
    """Fill an open .npy file with the tokens of texts.
    Returns what the texts were: {"documents": n, "bytes": n}."""
    from tqdm import tqdm   # comes with huggingface_hub; disable=None: only on a terminal
    blocks = itertools.chain.from_iterable(documents(name, column) for name in files)
    dtype = "|u1" if not text.tokenizer else "<u2" if text.size <= 1 << 16 else "<u4"
    header = {"descr": dtype, "fortran_order": False, "shape": (0,)}
    np.lib.format.write_array_header_1_0(f, header)
    count, about, total = 0, {"documents": 0, "bytes": 0}, sum(map(os.path.getsize, files))
    with tqdm(desc="tokens", total=total, unit="B", unit_scale=True, disable=None) as bar:
        for ids, size, end in encode_blocks(blocks, text):
            f.write(np.asarray(ids, dtype).tobytes())
            count += len(ids)
            about["bytes"] += size
            about["documents"] += end
            bar.update(size)
    f.seek(0)       # numpy leaves room for any count in the header
    np.lib.format.write_array_header_1_0(f, {**header, "shape": (count,)})
    return about


def make_token_file(files: list[str], config: dict, text: Text) -> tuple[Part, dict]:
    """(token file of texts, {"documents": n, "bytes": n}), made once: its name is a hash of the
    tokenizer, the column, and path, size and time of the files."""
    folder, column = Path(config["run"]["output_dir"], "tokens"), config["data"]["text_column"]
    stats = [(os.path.realpath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in files]
    key = hash64(stats, column, text.files.get("tokenizer.json"), text.special)
    path, made = folder / f"{key:016x}.npy", folder / f".{key:016x}.json"   # the last one written
    if made.exists():
        say(f"tokens   {path} from before")
        return token_file(str(path)), json.loads(made.read_bytes())
    say(f"tokens   making {path}, or waiting for the process that does")
    if text.tokenizer and text.eos is None:
        say("notice   this tokenizer has no token to put between documents")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            for leftover in folder.glob("*.tmp"):   # of a process that was killed
                leftover.unlink()
            if not made.exists():
                about = write_atomically(path, lambda f: write_tokens(f, files, column, text))
                write_atomically(made, lambda f: f.write(json.dumps(about).encode()))
    except OSError as e:
        raise OSError(f"run.output_dir: cannot write to {folder}: {one_line(e)}") from e
    return token_file(str(path)), json.loads(made.read_bytes())


def open_tokens(config: dict, key: str, text: Text, without=()):
    """The token array behind data.path or data.val_path (`key`), `without` some files."""
    path, vocab_size = config["data"][key], config["model"]["vocab_size"]
    if path == "synthetic":
        return Synthetic(vocab_size)
    out = {os.path.realpath(f) for f in without}
    files = {name: f for name, f in find_files(config, key).items()
             if os.path.getsize(f) and os.path.realpath(f) not in out}
    numbers = [f for f in files.values() if kind_of(f) == "token"]
    # Plain text for a model of bytes is read where it is. All other text becomes a token file.
    plain = [f for f in files.values() if kind_of(f) == "text" and not text.tokenizer
             and not f.lower().endswith(".gz")]
    texts = [f for f in files.values() if f not in {*plain, *numbers}]
    parts, about = [], {"documents": 0, "bytes": 0}
    if texts:
        part, about = make_token_file(texts, config, text)
        parts.append(part)
    for f in plain:
        if path != "stdlib":    # all else is read once, to see that it is text
            for _ in documents(f, ""):
                pass
        parts.append(Part(f, "|u1", 0, os.path.getsize(f)))
    # without a tokenizer a separator counts as text
    size = about["bytes"] if text.tokenizer else sum(part.count for part in parts)
    parts += [token_file(f, vocab_size) for f in numbers]
    documents_known = about["documents"] + len(plain)
    # nobody knows how many bytes of text the numbers stand for
    tokens = Tokens(parts, files, documents_known, 0 if numbers else size)
    if not len(tokens):
        left_out = ", validation data left out" if without else ""
        raise ValueError(f"data.{key}={path} is empty{left_out}")
    return tokens


def build_data(config: dict) -> tuple[Dataset, Dataset]:
    """(training data, validation data), disjoint: data.val_path, or the last tenth of data.path.
    Prints the data line. With a data.tokenizer model.vocab_size may grow: build the model after
    this. Raises OSError, ValueError or TrainingError, in one line."""
    fill_defaults(config)
    c, model, text = config["data"], config["model"], Text(config)
    if text.tokenizer and text.size > model["vocab_size"]:
        if model["init_from"] or config["run"]["resume"]:
            raise ValueError(f"data.tokenizer={c['tokenizer']} has {text.size:,} tokens, but the "
                             f"model's embedding holds {model['vocab_size']:,}: take its own one")
        model["vocab_size"] = text.size
    if c["val_path"]:
        val = open_tokens(config, "val_path", text)
        source = open_tokens(config, "path", text, val.paths)
        end, first, held_out = len(source), 0, f"validation: {c['val_path']} | {val.summary}"
    else:
        val = source = open_tokens(config, "path", text)
        end = first = len(val) - len(val) // 10
        held_out = "the last tenth is held out"
    say(f"data     {c['path']} | {source.summary} | {held_out}")
    count = config["run"]["eval_batches"] * c["micro_batch_size"]
    return Windows(source, range(end), config), Windows(val, range(first, len(val)), config, count)


def byte_tokenizer() -> bytes:
    """The tokenizer.json of models of bytes: a byte-level BPE without merges, token = byte."""
    # byte-level BPE writes a byte as a printable character, GPT-2's way
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    vocab = {chr(b if b in plain else next(others)): b for b in range(256)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
             "use_regex": False}
    return json.dumps({"added_tokens": [], "pre_tokenizer": level, "decoder": level,
                       "model": {"type": "BPE", "merges": [], "vocab": vocab}}).encode()


def name_byte_zero(content: bytes) -> tuple[bytes, int | None]:
    """A byte-level tokenizer.json with a padding token, and its id: byte 0, which is in no text.
    Any other tokenizer.json as it is, and None."""
    settings = json.loads(content)
    vocab, zero = settings["model"]["vocab"], "\u0100"      # what byte-level BPE calls byte 0
    if b'"ByteLevel"' not in content or zero not in vocab:
        return content, None
    # keep: a second name for that token. With its first one the letter \u0100 would be padding
    vocab["\0"] = vocab[zero]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    settings["added_tokens"].append(
        {**plain, "id": vocab[zero], "content": "\0", "special": True})
    return json.dumps(settings).encode(), vocab[zero]


def tokenizer_files(config: dict) -> tuple[dict, dict]:
    """What an export needs of the tokenizer: ({name: bytes} of the files with which transformers'
    AutoTokenizer reads and writes this model's tokens, {"bos_token_id", "eos_token_id",
    "pad_token_id": int}, those there are). Both are empty if the tokens came as numbers."""
    text = Text(config)
    if not text.tokenizer and config["model"]["vocab_size"] != 256:
        return {}, {}
    files, names = {"tokenizer.json": byte_tokenizer(), **text.files}, dict(text.special)
    ids = {f"{kind}_id": text.tokenizer.token_to_id(name) for kind, name in names.items()}
    fill = next((k for k in ("pad_token", "eos_token", "unk_token") if k in names), None)
    if fill:
        names["pad_token"], ids["pad_token_id"] = names[fill], ids[f"{fill}_id"]
    else:
        files["tokenizer.json"], zero = name_byte_zero(files["tokenizer.json"])
        if zero is not None:
            names["pad_token"], ids["pad_token_id"] = "\0", zero
    ids.pop("unk_token_id", None)
    # What the tokenizer's own file says stays.
    given = json.loads(files.get("tokenizer_config.json", b"{}"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "padding_side": "left",
                "clean_up_tokenization_spaces": False,
                "model_max_length": config["model"]["block_size"], **names,
                **{key: value for key, value in given.items() if value is not None}}
    files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode()
    return files, ids

# ---- batches: whatever a dataset or a loader gives, as tensors


def named(item) -> dict:
    """An item or a batch as a dict: from a dict, a tuple in the order of the names, an array, or a
    plain list of token ids."""
    if not isinstance(item, Mapping):
        ids = not isinstance(item, (tuple, list)) or item and isinstance(item[0], int)
        names = ("input_ids", "labels", "attention_mask")
        item = {"input_ids": item} if ids else dict(zip(names, item))
    if "input_ids" not in item:
        raise TrainingError(f"the data has {', '.join(map(str, item)) or 'nothing'}, and no "
                            f"input_ids: is the text tokenized?")
    return dict(item)


def tensors(item) -> dict:
    """What is numbers in an item or a batch, as tensors, whole numbers as int64."""
    found = {}
    for key, value in named(item).items():
        with contextlib.suppress(TypeError, ValueError):    # text, None, rows of unequal length
            if not isinstance(value, torch.Tensor):
                value = torch.from_numpy(np.array(value))
            whole = not value.is_floating_point() and value.dtype != torch.bool
            found[key] = value.long() if whole else value
    return found


def collate(items: list) -> dict:
    """One batch of many items. Rows of unequal length are padded on the right: there
    attention_mask is 0, and labels do not count."""
    rows = [tensors(item) for item in items]
    if len({len(row.get("input_ids", ())) for row in rows}) > 1:
        for row in rows:
            row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
    batch = {k: [row[k] for row in rows] for k in rows[0] if all(k in row for row in rows)}
    return {k: nn.utils.rnn.pad_sequence(v, True, IGNORE if k == "labels" else 0) if v[0].dim()
            else torch.stack(v) for k, v in batch.items()}


def tensors_of(batch) -> dict:
    """The tensors in a batch of any kind, with input_ids (B, T) int64."""
    batch = named(batch)
    ids = batch["input_ids"]
    if isinstance(ids, (list, tuple)) and isinstance(ids[0], torch.Tensor):
        # torch's default collation of lists: T times (B,)
        batch = {k: torch.stack(list(v), 1) for k, v in batch.items()
                 if isinstance(v, (list, tuple)) and isinstance(v[0], torch.Tensor)}
    elif isinstance(ids, (list, tuple)) and not isinstance(ids[0], int):
        batch = collate([dict(zip(batch, row)) for row in zip(*batch.values())])
    batch = tensors(batch)
    ids = batch.get("input_ids", torch.empty(0))
    if ids.dtype != torch.int64 or ids.dim() not in (1, 2):
        raise TrainingError(f"input_ids must be token ids (B, T), not {ids.dtype} of shape "
                            f"{tuple(ids.shape)}")
    if ids.dim() == 2:
        return batch
    return {k: v[None] for k, v in batch.items() if v.shape == ids.shape}


def as_batch(batch, memory: set, ignore: int = IGNORE) -> dict:
    """A batch as {"input_ids": (B, T), "labels": (B, T), maybe "attention_mask", ...}.

    labels[t] is the token after input_ids[t], and IGNORE where it does not count: padding, and what
    the batch itself marks by `ignore` or any negative number. Labels that are missing, or equal
    their input_ids as transformers has them, are shifted here. `memory` is one set for all batches
    of a source: after one whose labels were shifted already, the few labels of a later one that
    equal their inputs by chance are left alone. Raises TrainingError for what is no batch.
    """
    batch = tensors_of(batch)
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    labels = batch.get("labels", ids)
    if labels.shape != ids.shape or labels.dtype != torch.int64:
        raise TrainingError(f"labels are {labels.dtype} of shape {tuple(labels.shape)}, and "
                            f"input_ids of shape {tuple(ids.shape)}: each position wants one label")
    padding = torch.zeros_like(ids, dtype=torch.bool)
    if mask is not None and mask.shape == ids.shape:
        padding = mask == 0
    counts = ~padding & (labels >= 0)
    if "labels" in batch:
        counts &= labels != ignore
    labels = labels.masked_fill(~counts, IGNORE)
    differ = bool(((labels != ids) & counts).any())
    if differ:
        memory.add("shifted")
    if "labels" not in batch or not differ and not memory:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE).masked_fill(padding, IGNORE)
    return {**batch, "labels": labels}


@contextlib.contextmanager
def seeded(*parts):
    """Random numbers as a function of `parts` in here, and afterwards as if none had been drawn."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(hash64(*parts) >> 1)    # keep: of the CPU alone
    np.random.seed(hash64(*parts) & 0xFFFFFFFF)
    random.seed(hash64(*parts))
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
            return self.dataset[permute(item, len(self.dataset), hash64(*self.key, epoch))]


def worker_init(_):
    # A signal to the whole group is for the training process, which finishes its step and ends its
    # workers; one that is stuck ends itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.name == "posix":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(30))


def collate_bytes(collate_fn, items) -> bytes:
    # keep: tensors would leave a data process by /dev/shm, and torch waits for ever if that is full
    return pickle.dumps(collate_fn(items))


def start(loader):
    """iter(loader), with data processes that leave signals and /dev/shm alone."""
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return iter(loader)
    # keep: when a data process dies torch raises in the middle of whatever runs then. A step must
    # not be torn, so that handler goes: the next fetch tells.
    main = threading.current_thread() is threading.main_thread() and os.name == "posix"
    handler = signal.getsignal(signal.SIGCHLD) if main else None
    collate_fn, init = loader.collate_fn, loader.worker_init_fn
    loader.collate_fn = functools.partial(collate_bytes, collate_fn)
    loader.worker_init_fn = init or worker_init
    try:
        return map(pickle.loads, iter(loader))
    finally:
        loader.collate_fn, loader.worker_init_fn = collate_fn, init
        if main:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def is_map_style(data) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def replay(loader, config: dict):
    """The batches of somebody else's loader, epoch after epoch. What it draws at random is seeded
    batch by batch, so it draws the same again and the model's dropout never notices."""
    key = config["run"]["seed"], config["distributed"]["node_id"]
    for epoch in itertools.count():
        with seeded(*key, epoch, "epoch"):
            iterator = start(loader)
        for i in itertools.count():
            with seeded(*key, epoch, i, "batch"):
                batch = next(iterator, None)
            if batch is None:
                break
            yield batch
        if i == 0:
            raise TrainingError("the training data gave no batch")


def batches(data, config: dict, position: int):
    """Yield microbatches for ever, from sample `position` on. `data`: a Dataset, anything with a
    length and items, or an iterable of batches such as a DataLoader."""
    c = config["data"]
    if isinstance(data, IterableDataset):
        data = DataLoader(data, c["micro_batch_size"], collate_fn=collate)
    if not is_map_style(data):
        for batch in map(tensors_of, replay(data, config)):
            position -= len(batch["input_ids"])
            if position < 0:
                yield batch
    if not len(data):
        raise TrainingError("the training data is empty")
    if isinstance(data, Mapping):
        raise TrainingError(f"the training data is a dict of {', '.join(map(str, data))}: give one "
                            f"of them")
    if not isinstance(data, Windows):
        data = Shuffled(data, config)
    workers = c["num_workers"]
    yield from start(DataLoader(
        data, c["micro_batch_size"], sampler=itertools.count(position), collate_fn=collate,
        num_workers=workers, prefetch_factor=c["prefetch_factor"] if workers else None,
        generator=torch.Generator()))   # keep: its own, or each start would move the dropout masks

# ---- device, precision, optimizer, learning rate


def pick_device(name: str) -> torch.device:
    """The device that run.device names; auto takes the first there is of cuda, mps and cpu."""
    there = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    there = ["cuda", *there] if there else []
    there += ["mps", "cpu"] if torch.backends.mps.is_available() else ["cpu"]
    name = there[0] if name == "auto" else name
    if name not in there:
        raise ValueError(f"run.device={name} is not on this machine: use auto or one of "
                         f"{', '.join(there)}")
    return torch.device(name)


def cpu_has_fast_bf16() -> bool:
    """Whether bf16 products beat fp32 on this CPU: AMX tiles, AMD's AVX512_BF16, ARM's BF16.
    Intel's AVX512_BF16 without AMX does 165 GFLOP/s where fp32 does 310."""
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
        if not bf16:
            return torch.float16, "auto, no native bf16 here"
        return torch.bfloat16, "auto, native here"
    if wanted == "bf16" and not bf16 or wanted == "fp16" and not cuda:
        return torch.float32, f"{wanted} was asked for, but this {device.type} has no fast {wanted}"
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return dtypes[wanted], "as asked for"


def build_optimizers(
        model: nn.Module, c: dict, device: torch.device) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for the hidden matrices and AdamW for the rest; `c` is config.optimizer.

    A hidden matrix is the weight of neither an embedding nor the last nn.Linear, the output.
    Tensors of 2 dimensions or more decay. Raises ValueError for a model without parameters.
    """
    rest, matrices, optimizers = [p for p in model.parameters() if p.requires_grad], [], []
    if not rest:
        raise ValueError("the model has no trainable parameter")
    if c["name"] == "muon":
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
        outside = {id(m.weight) for m in embeddings + linears[-1:]}
        matrices = [p for p in rest if p.dim() == 2 and id(p) not in outside]
        rest = [p for p in rest if p.dim() != 2 or id(p) in outside]
    if matrices:    # match_rms_adamw: updates the size of AdamW's, so one learning rate serves both
        optimizers.append(torch.optim.Muon(matrices, lr=c["lr"], weight_decay=c["weight_decay"],
                                           adjust_lr_fn="match_rms_adamw"))
    groups = [dict(params=[p for p in rest if p.dim() >= 2], weight_decay=c["weight_decay"]),
              dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0)]
    if rest:
        options = dict(lr=c["lr"], betas=c["betas"], eps=c["eps"])
        try:
            optimizers.append(torch.optim.AdamW(groups, **options, fused=c["fused"] or None))
        except RuntimeError:    # no fused kernel for this device or dtype
            optimizers.append(torch.optim.AdamW(groups, **options))
    return optimizers


def lr_factor(step: int, c: dict) -> float:
    """Learning rate of the update from `step` to step + 1, as a fraction of the peak."""
    if step < c["warmup_steps"]:
        return (step + 1) / c["warmup_steps"]
    progress = min(1.0, (step - c["warmup_steps"]) / max(1, c["max_steps"] - c["warmup_steps"]))
    decay = {"constant": 0.0, "cosine": 0.5 * (1 - math.cos(math.pi * progress)),
             "wsd": max(0.0, progress - 0.8) / 0.2}[c["name"]]
    return 1 - decay * (1 - c["min_lr_ratio"])


def fit_warmup(c: dict):
    """Cut a warmup as long as the whole curve: the run would end below its learning rate."""
    if c["warmup_steps"] >= c["max_steps"]:
        short = c["max_steps"] // 10
        say(f"notice   scheduler.warmup_steps={c['warmup_steps']} is as long as the run: "
            f"{short} instead, a tenth of it")
        c["warmup_steps"] = short


def keep_freed_memory():
    """Have glibc keep freed blocks for the next step. To give them back and to fault them in again
    takes 5 % of a step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(-3, 32 << 20)       # M_MMAP_THRESHOLD: blocks up to 32 MiB from the heap
        mallopt(-1, 2**31 - 1)      # M_TRIM_THRESHOLD: and the heap does not shrink


def checkpoint_activations(model: nn.Module):
    """Turn gradient checkpointing on."""
    if hasattr(model, "set_gradient_checkpointing"):
        model.set_gradient_checkpointing(True)
    elif hasattr(model, "gradient_checkpointing_enable"):       # transformers
        model.gradient_checkpointing_enable()
    else:
        raise ValueError(f"run.gradient_checkpointing=True: a {type(model).__name__} has no "
                         f"set_gradient_checkpointing(enabled)")

# ---- any model: its loss, and samples of it


def ignore_index(model: nn.Module) -> int:
    """The label that does not count for a model, else IGNORE: the attribute ignore_index of the
    model, its config or its loss module, or ignore_index=... in its source."""
    losses = [m for m in model.modules() if isinstance(m, (nn.CrossEntropyLoss, nn.NLLLoss))]
    for owner in (model, getattr(model, "config", None), *losses):
        if isinstance(value := getattr(owner, "ignore_index", None), int):
            return value
    return written_ignore_index(type(model))


@functools.cache        # to find the source of a class takes up to a third of a second
def written_ignore_index(kind: type) -> int:
    with contextlib.suppress(OSError, TypeError):   # no source to read
        if written := re.search(r"ignore_index\s*=\s*(-?\d+)", inspect.getsource(kind)):
            return int(written[1])
    return IGNORE


class Loss:
    """The mean loss of any model over the labels of a batch that count.

    Its forward tells how the model is called. Its first batch tells whether it shifts labels
    itself, as transformers' models do.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype=torch.float32, pin=False):
        self.model, self.device, self.dtype, self.pin = model, device, dtype, pin
        self.ignore, self.memory = ignore_index(model), set()
        self.shifts = None      # not known yet
        parameters = inspect.signature(model.forward).parameters.values()
        self.names = {p.name for p in parameters}       # of the arguments that go by name
        if any(p.kind == p.VAR_KEYWORD for p in parameters):
            self.names |= {"input_ids", "labels", "attention_mask"}
        places = [p for p in parameters if p.kind <= p.VAR_POSITIONAL]
        if places:
            self.names.discard("input_ids")     # it is the first argument, whatever its name
        self.second = "labels" not in self.names and any(map(takes_labels, places[1:2]))

    def prepare(self, batch: dict) -> tuple[dict, int]:
        """(any batch with its labels where this model wants them, how many of them count)."""
        batch = as_batch(batch, self.memory, self.ignore)
        if self.shifts is None:
            self.shifts = self.shifts_inside(batch)
        labels = batch["labels"]
        if self.shifts:     # in line with input_ids; the last one of a row is never seen
            labels = F.pad(labels[:, :-1], (1, 0), value=IGNORE)
        return {**batch, "labels": labels}, int((labels != IGNORE).sum())

    def __call__(self, forward, batch: dict) -> torch.Tensor:
        """Mean loss of a batch of prepare(), NaN or 0 if no label counts. `forward` is the model,
        or the compiled one."""
        if self.pin:        # only from pinned memory a copy does not hold up the GPU
            batch = {k: v.pin_memory() for k, v in batch.items()}
        batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
        ids, labels = batch["input_ids"], batch["labels"]
        theirs = batch["labels"] = labels.masked_fill(labels == IGNORE, self.ignore)
        named = {k: v for k, v in batch.items() if k in self.names}
        places = [] if "input_ids" in named else [ids, theirs] if self.second else [ids]
        try:
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
                return loss_of(forward(*places, **named), labels)
        except IndexError as e:
            if f"Target {self.ignore} is out of bounds" not in str(e):
                raise
            raise TrainingError(f"{type(self.model).__name__} does not take {self.ignore} for a "
                                f"label that does not count: give the model an attribute "
                                f"ignore_index with the number that it takes") from e

    @torch.no_grad()
    def shifts_inside(self, batch: dict) -> bool:
        """Whether the model shifts labels itself. It then never uses the label of the first
        position: the loss with that label alone is the loss without any."""
        if not self.second and "labels" not in self.names:
            return False
        # two equal rows with different labels, which no model can both predict: never a loss of 0
        rows = {k: v[:1].expand(2, *v.shape[1:]) for k, v in batch.items() if v.dim()}
        if "attention_mask" in rows:        # the first position may be padding
            rows["attention_mask"] = torch.ones_like(rows["attention_mask"])
        none = torch.full_like(rows["labels"], IGNORE)
        first = none.clone()
        first[:, 0] = torch.tensor([t for t in (1, 2, 3) if t != self.ignore][:2])
        was_training = self.model.training
        self.model.eval()
        try:
            with seeded("labels"):
                losses = [self(self.model, {**rows, "labels": labels}) for labels in (first, none)]
            return torch.allclose(*losses, rtol=0, atol=0, equal_nan=True)
        except Exception:       # a model of a handful of tokens, say: training tells what is wrong
            return False
        finally:
            self.model.train(was_training)


def takes_labels(second: inspect.Parameter) -> bool:
    """Whether the second argument of a forward without `labels` is the labels."""
    if second.kind == second.VAR_POSITIONAL or second.name in ("attention_mask", "position_ids"):
        return False
    return second.default is second.empty or second.name in ("targets", "target", "y")


def loss_of(output, labels) -> torch.Tensor:
    """The scalar loss in what a model returned; from logits (B, T, V) it is the causal LM loss."""
    if isinstance(output, (tuple, list)):
        parts = output
    elif hasattr(output, "keys"):
        parts = [output.get("loss"), output.get("logits")]
    else:
        parts = [getattr(output, "loss", None), getattr(output, "logits", None), output]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    for tensor in tensors:
        if tensor.numel() == 1:
            return tensor.reshape(())
    if not tensors or tensors[0].shape[:-1] != labels.shape:
        raise TrainingError(f"the model returned {type(output).__name__}, which holds neither a "
                            f"loss nor logits of shape (B, T, V)")
    return F.cross_entropy(tensors[0].float().flatten(0, -2), labels.flatten(), ignore_index=IGNORE)


@torch.no_grad()
def mean_loss(model, data, config: dict, device, dtype=torch.float32) -> float:
    """Mean loss over the labels that count in the first run.eval_batches microbatches of `data`,
    without dropout."""
    if is_map_style(data) or isinstance(data, IterableDataset):
        data = DataLoader(data, config["data"]["micro_batch_size"], collate_fn=collate)
    loss, total, count = Loss(model, device, dtype), 0.0, 0
    model.eval()
    with seeded("eval"):    # the same batches each time, and training does not notice
        for batch in itertools.islice(start(data), config["run"]["eval_batches"]):
            batch, labels = loss.prepare(batch)
            if labels:
                total += loss(model, batch).item() * labels
                count += labels
    model.train()
    if not count:
        raise TrainingError("the validation data gave no batch with a label that counts")
    return total / count


@torch.no_grad()
def generate(model: nn.Module, ids: list[int], config: dict, count: int, stop=None) -> list[int]:
    """`ids` and up to `count` tokens after them, as config.sample says, from any model that returns
    logits; none after the token `stop`. A context of block_size tokens loses its older half. Keys
    and values are kept if the model's forward takes a `cache`: the same tokens, in a fraction of
    the time."""
    block_size, device = config["model"]["block_size"], next(model.parameters()).device
    # its own: a sample must not move the training run
    generator = torch.Generator().manual_seed(config["run"]["seed"])
    was_training, cache = model.training, {}
    named = {"cache": cache} if "cache" in inspect.signature(model.forward).parameters else {}
    model.eval()
    ids, begin = list(ids), max(0, len(ids) - block_size)
    for _ in range(count):
        if len(ids) - begin > block_size:
            begin = len(ids) - (block_size + 1) // 2
            cache.clear()
        unseen = ids[begin + cache.get("length", 0):]
        output = model(torch.tensor([unseen], device=device), **named)
        if isinstance(output, tuple):
            output = output[0]
        logits = output["logits"] if hasattr(output, "keys") else output    # (1, T, V)
        ids.append(pick(logits[0, -1].float().cpu(), config["sample"], generator))
        if ids[-1] == stop:
            break
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


def print_sample(model: nn.Module, config: dict, text, count: int):
    """Print run.sample and up to `count` tokens after it. `text` is a Text."""
    try:
        prompt = text.encode(config["run"]["sample"]) or text.encode("\n")
        if max(prompt) >= config["model"]["vocab_size"]:
            raise ValueError("the prompt is outside the vocabulary")
        sample = text.decode(generate(model, prompt, config, count, text.eos))
    except Exception as e:      # a model that wants labels, say
        raise TrainingError(f"no sample: {type(e).__name__}: {one_line(e)}") from e
    say(f"sample   {'-' * 60}\n{sample}\n{'-' * 69}")

# ---- checkpoints


def write_atomically(path: Path, write):
    """Call write(file), and let `path` be the whole result or what it was before. Returns what
    write() does."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            result = write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)  # the rename itself
            os.close(folder)
        return result
    except BaseException as e:      # a Ctrl-C, too, leaves nothing half written
        with contextlib.suppress(OSError):
            temporary.unlink()
        # torch.save reports a failed write as a RuntimeError, in the context of the real one
        cause = e.__context__ if isinstance(e, RuntimeError) and e.__context__ else e
        if not isinstance(cause, OSError):
            raise
        raise TrainingError(f"cannot write {path}: {one_line(cause)[:200]}") from e


def run_folder(config: dict) -> Path:
    run = config["run"]
    return Path(run["output_dir"], run["name"], config["distributed"]["node_id"])


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, newest first."""
    return sorted((p for p in folder.glob("step_*.pt")
                   if re.fullmatch(r"step_\d{12}\.pt", p.name)), reverse=True)


def read_checkpoint(path: Path, check=True) -> dict:
    """A checkpoint, with every byte checked against its CRC; check=False maps the file instead, for
    its settings."""
    try:
        with zipfile.ZipFile(path) as z:
            if check and (bad := z.testzip()):
                raise ValueError(f"{bad} does not match its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=not check)
        state["model"], state["optimizers"], state["config"]    # is it a checkpoint at all?
        return state
    except Exception as e:  # a damaged file can fail anywhere in zip, pickle and torch
        raise ValueError(f"{path} is damaged: {one_line(e)[:200]}") from e


def load_checkpoint(config: dict, check=True) -> tuple[Path, dict]:
    """(path, state) of a run's newest checkpoint that is whole, or of its best one with run.best.
    Says which are damaged."""
    folder, best = run_folder(config), config["run"]["best"]
    for path in folder.glob("best.pt") if best else checkpoints(folder):
        try:
            return path, read_checkpoint(path, check)
        except ValueError as e:
            say(f"notice   {e}")
    raise FileNotFoundError(f"no usable {'best.pt' if best else 'checkpoint'} in {folder}: name "
                            f"the run with --name, or train without --resume")


def load_model(model: nn.Module, state: dict, path: Path):
    """Fill a model from a checkpoint."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as e:
        raise ValueError(f"{path} is of another model: {one_line(e)[:300]}") from None


def load_optimizers(optimizers: list, states: list, path: Path):
    """Give optimizers the state of a checkpoint; their settings stay."""
    if len(states) != len(optimizers):
        raise ValueError(f"{path} was written with another optimizer.name")
    for optimizer, state in zip(optimizers, states):
        for group, now in zip(state["param_groups"], optimizer.param_groups):
            group.update({k: v for k, v in now.items() if k != "params"})
        optimizer.load_state_dict(state)


def changes(before: dict, now: dict) -> str:
    """The settings in which two configs differ, as a reader would write them."""
    skip = {"run.resume", "run.best", "run.sample", "run.export", "run.plot", "run.name",
            "run.output_dir", "run.config", "run.expected_loss", "run.flags", "model.init_from",
            "data.accumulation"}
    if all(c["scheduler"]["max_steps"] == c["run"]["max_steps"] for c in (before, now)):
        skip.add("scheduler.max_steps")     # it follows
    return ", ".join(f"{section}.{key}={now[section][key]} (was {was})"
                     for section in now if section in before
                     for key, was in before[section].items()
                     if f"{section}.{key}" not in skip and now[section].get(key, was) != was)


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
    random.setstate(state["python"])


def read_events(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl. One that is damaged, cut off by a kill, or just being written
    is left out."""
    found = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("step"), int):
                found.append(event)
    return found


def forget_after(folder: Path, step: int):
    """Drop the lines of metrics.jsonl that later steps will write again, and add one that says
    where the run goes on."""
    path = folder / "metrics.jsonl"
    kept = [event for event in read_events(path) if event["step"] <= step]
    kept.append({"event": "resume", "step": step, "path": f"step_{step:012d}.pt"})
    lines = "".join(json.dumps(event) + "\n" for event in kept)
    write_atomically(path, lambda f: f.write(lines.encode()))

# ---- watching: a picture, TensorBoard, a bar


def draw(runs: dict) -> str:
    """An SVG of the losses of some runs and, below, of their learning rates, if there are any.

    runs: {name: {"train": [(step, loss)], "val": [(step, loss)], "lr": [(step, lr)]}}, each list
    may be empty or missing; what is not finite is left out. Raises ValueError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs a package: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    heights = (4, 1) if any(run.get("lr") for run in runs.values()) else (1,)
    parts = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)
    losses, rates, tops = parts[0, 0], parts[-1, 0], []
    for i, (name, run) in enumerate(runs.items()):
        train, val, lr = (curve(run.get(kind)) for kind in ("train", "val", "lr"))
        label = "".join(c for c in name if c.isprintable())[:20].replace("$", r"\$")
        y = np.concatenate([train[:, 1], val[:, 1]])
        if len(y):
            last = (val if len(val) else train)[-1, 1]
            label = f"{last:.4f} {label}"
            # without the fall of the first steps and the end of a run that blew up
            tops.append(y.min() + 5 * (np.quantile(y, 0.75) - y.min()))
        for axes, points, width, named in ((losses, train, 0.8, None), (losses, val, 2.2, label),
                                           (rates, lr, 1.2, None)):
            axes.plot(points[:, 0], points[:, 1], f"C{i % 10}", lw=width, label=named,
                      marker="o" if len(points) == 1 else "none")
    if tops and losses.get_ylim()[0] < min(tops) < losses.get_ylim()[1]:
        losses.set_ylim(top=min(tops))
    if rates is not losses:
        rates.set(ylabel="learning rate")
    rates.set(xlabel="step")
    losses.set(ylabel="loss", title="thick: validation, thin: training")
    losses.grid(alpha=0.3)
    if runs:
        losses.legend()
    out = io.StringIO()
    figure.savefig(out, format="svg")
    return out.getvalue()


def curve(points) -> np.ndarray:
    """(N, 2) of at most 2,000 of the finite points (step, value), in the order of steps."""
    found = sorted(p for p in points or ()
                   if all(isinstance(v, (int, float)) and abs(v) < 1e30 for v in p))
    few = np.linspace(0, len(found) - 1, min(len(found), 2000)).astype(int)
    return np.array([found[i] for i in few]).reshape(-1, 2)


def read_curves(path: Path) -> dict:
    """What draw() takes of a run, out of its metrics.jsonl."""
    events, keys = read_events(path), {"train": "loss", "val": "val_loss", "lr": "lr"}
    return {name: [(event["step"], event[key]) for event in events if key in event]
            for name, key in keys.items()}


def plot(config: dict) -> Path:
    """Write loss.svg and return its path: in the run's folder or, for several runs (run.name=a,b),
    in run.output_dir. The nodes of a swarm below runs/<name>/ are several runs too. It only reads
    the runs, which may be going on."""
    root, node = Path(config["run"]["output_dir"]), config["distributed"]["node_id"]
    files = [*root.glob("*/metrics.jsonl"), *root.glob("*/*/metrics.jsonl")]
    there = sorted(f.parent for f in files)
    names = [name.strip() for name in config["run"]["name"].split(",")]
    folders, runs = [root / name / node for name in names if name], {}
    for folder in folders:
        found = [f for f in there if f == folder] or [f for f in there if f.parent == folder]
        if not found:
            names = ", ".join(f.relative_to(root).as_posix() for f in there)
            raise FileNotFoundError(f"--plot: no run in {folder}; there are: {names or 'none'}")
        for f in found:
            runs[f.relative_to(root).as_posix()] = read_curves(f / "metrics.jsonl")
    if not any(run["train"] or run["val"] for run in runs.values()):
        raise ValueError(f"--plot: no loss to draw yet in {', '.join(runs)}")
    path = (folders[0] if len(folders) == 1 else root) / "loss.svg"
    path.write_text(draw(runs), encoding="utf-8")
    return path


def summary_writer() -> type:
    try:
        from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter
    except ImportError as e:
        raise ValueError(f"logging.tensorboard=True needs a package: pip install tensorboard "
                         f"({one_line(e)[:100]})") from e


def write_scalars(writer, event: str, payload: dict):
    """A hook, with a SummaryWriter: the numbers of the `step` and `eval` lines."""
    for key in ("loss", "lr", "grad_norm", "tokens_per_s", "val_loss", "val_loss_per_byte"):
        if event in ("step", "eval") and payload.get(key) is not None:
            writer.add_scalar(key, payload[key], payload["step"])


@contextlib.contextmanager
def bar(first: int, total: int):
    """A progress bar in the last line of a terminal, with all that is printed above it; None if
    stdout is no terminal, or without tqdm."""
    drawn, out, error = None, sys.stdout, sys.stderr
    if first < total and out and out.isatty() and os.environ.get("TERM") != "dumb":
        with contextlib.suppress(ImportError):
            from tqdm import tqdm       # comes with huggingface_hub
            from tqdm.contrib import DummyTqdmFile
            drawn = tqdm(initial=first, total=total, file=out, dynamic_ncols=True,
                         bar_format="step     {n_fmt}/{total_fmt} |{bar}| {desc}")
    if drawn is None or drawn.disable:  # by TQDM_DISABLE=1
        yield None
        return
    above = DummyTqdmFile(out)
    try:
        with (contextlib.redirect_stdout(above),
              contextlib.redirect_stderr(above if error and error.isatty() else error)):
            yield drawn
    finally:
        with contextlib.suppress(OSError):      # the terminal may be gone
            drawn.close()       # it stays, as a whole line, with the last loss


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 5400 else f"{seconds / 3600:.1f}h"


class Clock:
    """What the next `step` line counts: time, steps and tokens since the one before."""

    def __init__(self):
        self.began = time.perf_counter()
        self.restart()

    def restart(self):
        self.since, self.steps, self.tokens = time.perf_counter(), 0, 0

    def skip(self, seconds: float):
        """Leave out the time of an evaluation or a checkpoint, which is not training."""
        self.began, self.since = self.began + seconds, self.since + seconds

# ---- the trainer


def out_of_memory(e: BaseException) -> str:
    """One line for an allocation that failed, "" for any other exception."""
    if not (isinstance(e, (MemoryError, torch.OutOfMemoryError))
            or isinstance(e, RuntimeError) and "can't allocate memory" in str(e)):
        return ""
    return (f"out of memory: {one_line(e)[:120]}; lower --micro-batch-size, which changes no "
            f"result, or add --gradient-checkpointing")


def outside_trouble(e: Exception) -> str:
    """One line for what ends a run from outside: bad data, a data process, memory, a disk, the
    network. "" for a bug, which keeps its traceback."""
    lines = str(e).strip().splitlines() or [type(e).__name__]
    if "DataLoader worker" in lines[0] and "exited unexpectedly" in lines[0]:
        return (f"a data process has died ({lines[0][:80]}): is memory or /dev/shm full? "
                f"--num-workers=0 reads in the training process")
    if isinstance(e, (TrainingError, OSError)):     # a data process sends its traceback as text
        return re.sub(r"^\w[\w.]*Error: ", "", lines[-1])
    return out_of_memory(e)


@contextlib.contextmanager
def catching_signals(handler):
    """Ctrl-C, SIGTERM and SIGHUP go to `handler` in here. A SIGHUP that nohup ignores stays
    ignored."""
    numbers, before = [signal.SIGINT, signal.SIGTERM], {}
    if os.name == "posix" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    if threading.current_thread() is threading.main_thread():   # Python allows it nowhere else
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


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
        run = fill_defaults(config)["run"]
        self.config, self.train_data, self.val_data = config, train_data, val_data
        self.coordinator, self.hooks, self.bar = coordinator, list(hooks), None

        # the machine
        self.device = pick_device(run["device"])
        self.dtype, why = pick_precision(run["precision"], self.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        elif self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 for what stays fp32

        # the model and what updates it
        torch.manual_seed(hash64(run["seed"], config["distributed"]["node_id"]) >> 1)  # dropout
        self.model = model.to(self.device)
        if run["gradient_checkpointing"]:
            checkpoint_activations(model)
        self.forward = torch.compile(model) if run["compile"] else model
        self.optimizers = build_optimizers(model, config["optimizer"], self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        pin = config["data"]["pin_memory"]
        pin = self.device.type == "cuda" if pin == "auto" else pin == "true"
        self.loss = Loss(model, self.device, self.dtype, pin)
        fit_warmup(config["scheduler"])

        # where the run is
        self.step = 0               # absolute
        self.position = 0           # samples taken from the data
        self.tokens = 0             # labels learned from
        self.best = {"step": None, "val_loss": math.inf}
        self.last_loss = torch.zeros(())
        # on the device: to look at them is a sync. Has a loss or a gradient not been finite? How
        # many updates in a row has fp16 skipped?
        self.not_finite = torch.zeros((), dtype=torch.bool, device=self.device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.device)
        self.whole = True           # False while an update is half done
        self.fetching = False       # True while the next batches are waited for
        self.stop_signal = None     # the name of the one that ends the run

        self.open_folder(run_folder(config))
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        say(f"device   {self.device} | {str(self.dtype)[6:]} ({why}) | "
            f"{torch.get_num_threads()} CPU threads")
        say(f"model    {type(model).__name__} | {trained:,} parameters | to step "
            f"{run['max_steps']:,}")
        if run["expected_loss"]:
            say(f"expect   a validation loss near {run['expected_loss']:.2f}")
        say(f"folder   {self.folder}")

    def open_folder(self, folder: Path):
        """Lock the run's folder, then begin a run in it or resume the one it holds."""
        self.folder, self.writer = folder, None
        resume = self.config["run"]["resume"]
        # what can be refused is refused before the folder is made or touched
        make_writer = summary_writer() if self.config["logging"]["tensorboard"] else None
        if resume and not folder.exists():
            load_checkpoint(self.config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(folder / ".lock")      # the kernel drops it with the process
            self.lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"{folder}: another process is training in this folder") from None
        except OSError as e:
            raise OSError(f"run.output_dir: cannot write to {folder}: {e.strerror}") from e
        try:
            for leftover in folder.glob("*.tmp"):   # of a process that was killed while writing
                leftover.unlink()
            if resume:
                self.resume()
            elif self.checkpoints():
                raise ValueError(f"{folder} already holds a run: "
                                 f"add --resume to go on, or --name=ANOTHER")
            self.metrics = open(folder / "metrics.jsonl", "a" if resume else "w", encoding="utf-8")
        except BaseException:
            self.lock.release()
            raise
        if make_writer:     # purge_step: an earlier process may have written steps that come again
            self.writer = make_writer(folder / "tensorboard", purge_step=self.step + 1,
                                      flush_secs=10)
            self.hooks.append(functools.partial(write_scalars, self.writer))

    # one line per event, the same numbers for a reader, a file and the hooks

    def emit(self, event: str, line: str, **payload):
        if event != "step" or not self.bar:     # the bar shows these
            say(f"{event:<8} {line}")
        payload = {k: None if isinstance(v, float) and not math.isfinite(v) else v
                   for k, v in payload.items()}     # JSON has no infinity
        self.metrics.write(json.dumps({"event": event, **payload}) + "\n")
        self.metrics.flush()
        for hook in self.hooks:
            hook(event, payload)

    def progress(self) -> str:
        total = str(self.config["run"]["max_steps"])
        return f"{self.step:>{len(total)}}/{total}"

    # checkpoints

    def checkpoints(self) -> list[Path]:
        return checkpoints(self.folder)

    def state_dict(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "step": self.step, "position": self.position, "tokens": self.tokens,
            "best": self.best, "last_loss": float(self.last_loss), "random": random_state(),
            "config": self.config, "data": getattr(self.train_data, "fingerprint", None),
            "coordinator": self.coordinator.state_dict() if self.coordinator else None,
        }

    def save(self):
        """Write step_<step>.pt, point latest.json at it, and delete what checkpoint.keep_last does
        not keep."""
        self.refuse_not_finite()
        path = self.folder / f"step_{self.step:012d}.pt"
        state = self.state_dict()
        write_atomically(path, lambda f: torch.save(state, f))
        latest = json.dumps({"step": self.step, "path": path.name}).encode()
        write_atomically(self.folder / "latest.json", lambda f: f.write(latest))
        for old in self.checkpoints()[self.config["checkpoint"]["keep_last"]:]:
            old.unlink()
        self.emit("checkpoint", f"{self.progress()} | {path}", step=self.step, path=path.name)

    def resume(self):
        """Continue from the newest checkpoint that is whole, or from the best one, and say which
        settings are others now."""
        path, state = load_checkpoint(self.config)
        load_model(self.model, state, path)
        load_optimizers(self.optimizers, state["optimizers"], path)
        if state["scaler"]:     # a run of another precision has none: fp16 begins with a new one
            self.scaler.load_state_dict(state["scaler"])
        self.last_loss = torch.tensor(state["last_loss"])
        self.step, self.position, self.tokens, self.best = (
            state[k] for k in ("step", "position", "tokens", "best"))
        set_random_state(state["random"])
        if self.coordinator and state["coordinator"]:
            self.coordinator.load_state_dict(state["coordinator"])
        # a newer one would pass for the newest: it is damaged, or was left for the best
        ending = ".left" if self.config["run"]["best"] else ".damaged"
        for newer in self.checkpoints():
            if int(newer.stem[5:]) > self.step:
                say(f"notice   {newer.name} is set aside as {newer.name}{ending}")
                newer.rename(newer.with_name(newer.name + ending))
        forget_after(self.folder, self.step)
        line = f"resume   from {path} at step {self.step:,}"
        if changed := changes(state["config"], self.config):
            line += f" | now {changed}"
        say(line)
        if change := data_change(state.get("data"), getattr(self.train_data, "fingerprint", None)):
            say(f"notice   {change}")

    # evaluation and samples

    def evaluate(self) -> float:
        return mean_loss(self.model, self.val_data, self.config, self.device, self.dtype)

    def eval_and_keep_best(self):
        """Evaluate, write best.pt if this is the best, and print a sample."""
        self.refuse_not_finite()
        val_loss = self.evaluate()
        if not math.isfinite(val_loss):
            self.not_finite.fill_(True)     # nothing of it is saved
            raise TrainingError(f"step {self.step}: the validation loss is {val_loss}")
        if val_loss < self.best["val_loss"]:
            self.best = {"step": self.step, "val_loss": val_loss}
            state = {**self.state_dict(), **self.best}
            write_atomically(self.folder / "best.pt", lambda f: torch.save(state, f))
        line = (f"{self.progress()} | val {val_loss:.4f} | "
                f"best {self.best['val_loss']:.4f} @ {self.best['step']}")
        per_token, payload = getattr(self.val_data, "bytes_per_token", None), {}
        if per_token and per_token != 1:    # comparable between tokenizers, and with bytes
            payload = {"val_loss_per_byte": val_loss / per_token}
            line += f" | {val_loss / per_token:.4f} per byte"
        self.emit("eval", line, step=self.step, val_loss=val_loss, **payload)
        if not self.config["run"]["sample"]:
            return
        count = self.config["sample"]["tokens"]
        if self.step < self.config["run"]["max_steps"]:
            count = min(100, count)
        try:
            print_sample(self.model, self.config, self.text, count)
        except TrainingError as e:      # the run itself is well
            say(f"notice   {e}")

    @functools.cached_property
    def text(self):
        return Text(self.config)        # once: it may ask the Hub

    # one update

    def next_batches(self, data) -> tuple[list[tuple[dict, int]], int]:
        """The microbatches of the next update with their numbers of labels, none if a signal ends
        the wait for them, and how many samples were taken."""
        samples, self.fetching = 0, True    # a signal need not wait for a loader that hangs
        try:
            for _ in range(100):
                microbatches = [self.loss.prepare(next(data))
                                for _ in range(self.config["data"]["accumulation"])]
                samples += sum(len(batch["input_ids"]) for batch, _ in microbatches)
                if any(count for _, count in microbatches):
                    return microbatches, samples
        except BaseException:
            if self.stop_signal:    # it ended the wait, or the data processes
                return [], samples
            raise
        finally:
            self.fetching = False
        raise TrainingError("the batches of 100 steps in a row hold no label that counts")

    def forward_backward(self, microbatches: list) -> tuple[torch.Tensor, int]:
        """Accumulate the gradients of the mean loss over all labels that count in the microbatches.
        Returns that loss, still on the device, and the number of labels."""
        total = torch.zeros((), device=self.device)
        labels = sum(count for _, count in microbatches)
        try:
            for batch, count in microbatches:
                if not count:
                    continue        # its own mean would be NaN
                loss = self.loss(self.forward, batch) * (count / labels)
                self.scaler.scale(loss).backward()
                total += loss.detach()
        except Exception as e:
            if self.forward is self.model:
                raise
            if not self.stop_signal:        # else it is the compiler's processes that were stopped
                say(f"notice   torch.compile failed, going on without it: "
                    f"{type(e).__name__}: {one_line(e)[:200]}")
            self.forward = self.model
            self.model.zero_grad(set_to_none=True)
            return self.forward_backward(microbatches)
        return total, labels

    def learning_rate(self) -> float:
        lr, step = self.config["optimizer"]["lr"], self.step
        if hasattr(self.coordinator, "lr_scale"):
            lr *= self.coordinator.lr_scale(step)
        if hasattr(self.coordinator, "schedule_step"):
            step = self.coordinator.schedule_step(step)
        return lr * lr_factor(step, self.config["scheduler"])

    def refuse_not_finite(self):
        if self.not_finite.item():
            newest = next((str(p) for p in self.checkpoints()), "none yet")
            raise TrainingError(f"the loss or a gradient is not finite near step {self.step + 1}: "
                                f"lower optimizer.lr, or look at the data; "
                                f"the last good checkpoint is {newest}")

    def refuse_collapse(self):
        """fp16 skips an update whose gradients overflow, and halves its scale. Where that goes on
        and on the weights stand still. They are good ones, and are saved."""
        if not self.scaler.is_enabled():
            return
        skipped, scale = self.skipped.item(), self.scaler.get_scale()
        if skipped >= SKIPPED or scale < 1:
            raise TrainingError(f"step {self.step}: fp16 has skipped {skipped} updates in a row, "
                                f"its loss scale is {scale:.3g}: take --precision=bf16 or fp32, or "
                                f"lower --lr")

    # the work

    def train(self):
        """Run to max_steps, or to a signal, and evaluate and save there. Whatever ends a run from
        outside an update saves first. Raises TrainingError, in one line, for what is no bug."""
        with catching_signals(self.on_signal):
            try:
                self.run()
            except Exception as e:
                if self.whole and self.step and not self.not_finite.item():
                    self.save()
                if line := outside_trouble(e):
                    # keep: torch's own frames hold data processes, which then end only after 10 s
                    traceback.clear_frames(e.__traceback__)
                    raise TrainingError(line) from e
                raise
            finally:
                if self.writer:
                    self.writer.close()
                self.lock.release(force=True)

    def on_signal(self, number, _):
        """The first signal ends the run after the step under way, the second one at once, as a
        KeyboardInterrupt."""
        if self.stop_signal:
            raise KeyboardInterrupt
        self.stop_signal = signal.Signals(number).name
        line = f"stop     {self.stop_signal}: finishing this step, then saving; again to stop now\n"
        if self.bar:
            line = "\r\x1b[K" + line
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal any more
            os.write(sys.__stdout__.fileno(), line.encode())    # keep: print may be interrupted
        if self.fetching:
            raise KeyboardInterrupt

    def run(self):
        """All of a run but the handling of trouble: the coordinator's start, the loop, the end."""
        if self.coordinator:
            self.coordinator.start(self)    # may move to another step
        first, total = self.step, self.config["run"]["max_steps"]
        data = batches(self.train_data, self.config, self.position)
        # closing the generator ends its data processes
        with contextlib.closing(data), bar(first, total) as self.bar:
            self.loop(data)
        if self.coordinator:
            if self.step > first:
                self.save()         # before the wait for an upload
            self.coordinator.finish(self)
        if self.step == first and not self.stop_signal:
            more = "" if self.coordinator else ": --max-steps=MORE goes on"
            return say(f"done     already at step {self.step} of {total}{more}")
        if self.val_data is not None and not self.stop_signal:
            self.eval_and_keep_best()
        self.save()
        if self.stop_signal:
            how = "the next start" if self.coordinator else "--resume"
            say(f"stop     {self.stop_signal}: the state is saved, {how} goes on from step "
                f"{self.step}")

    def loop(self, data):
        """THE LOOP: learning rate, microbatches, clip, step, coordinator, log, eval, checkpoint."""
        c, first, clock = self.config, self.step, Clock()
        params = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self.model.train()
        while self.step < c["run"]["max_steps"] and not self.stop_signal:
            lr = self.learning_rate()
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
            microbatches, samples = self.next_batches(data)
            if not microbatches:
                return
            if self.step == first:
                n, (B, T) = len(microbatches), microbatches[0][0]["input_ids"].shape
                say(f"batch    {n} x {B} x {T} = {n * B * T:,} tokens per step "
                    f"(microbatches x samples x positions)")
            loss, tokens = self.forward_backward(microbatches)

            # The update. From here to its end the state is torn, and nothing saves it.
            self.whole = False
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(params, c["optimizer"]["grad_clip"] or math.inf)
            self.not_finite |= ~torch.isfinite(loss if self.scaler.is_enabled() else loss + norm)
            self.skipped = torch.where(torch.isfinite(norm), 0, self.skipped + 1)
            if self.device.type == "cpu":   # elsewhere a sync: there before log, eval and save
                self.refuse_not_finite()
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
                optimizer.zero_grad(set_to_none=True)
            self.scaler.update()
            self.step, self.last_loss = self.step + 1, loss
            self.position, self.tokens = self.position + samples, self.tokens + tokens
            self.whole = True

            # Between two updates: the swarm, a line, evaluation, a checkpoint.
            if self.coordinator:
                self.coordinator.after_step(self)
            clock.steps, clock.tokens = clock.steps + 1, clock.tokens + tokens
            if self.bar:
                self.bar.update(self.step - self.bar.n)     # a coordinator may have moved it
            done, last = self.step - first, self.step >= c["run"]["max_steps"]
            if done in (1, 2, 5, 10) or last or self.due(c["logging"]["every_steps"]):
                self.log(clock, loss, lr, norm)
            if done == WARM_STEPS:      # the rate of later steps counts from here
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                clock.restart()
            if last:        # run() evaluates and saves
                return
            pause = time.perf_counter()
            if self.due(c["run"]["eval_every"]) and self.val_data is not None:
                self.eval_and_keep_best()
            if self.due(c["checkpoint"]["every_steps"]):
                self.save()
            clock.skip(time.perf_counter() - pause)

    def due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def log(self, clock: Clock, loss, lr: float, norm):
        """One `step` line."""
        self.refuse_not_finite()    # waits for the device: only then is the clock right
        self.refuse_collapse()
        loss, norm, now = loss.item(), norm.item(), time.perf_counter()
        seconds, rate = (now - clock.since) / clock.steps, clock.tokens / (now - clock.since)
        eta = duration((self.config["run"]["max_steps"] - self.step) * seconds)
        if self.bar:
            self.bar.set_description_str(f"loss {loss:.4f} | {rate:,.0f} tok/s | eta {eta}",
                                         refresh=False)
        self.emit("step", f"{self.progress()} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.2f} | "
                          f"{seconds * 1e3:,.0f} ms | {rate:,.0f} tok/s | eta {eta}",
                  step=self.step, loss=loss, lr=lr, grad_norm=norm, tokens=self.tokens,
                  tokens_per_s=rate, seconds=now - clock.began)
        clock.restart()
