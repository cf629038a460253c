"""
All tests, in the order of the files, and the study of the README.

    python test_all.py                          # on all cores
    python -m pytest -q test_all.py -k WORD     # those of a topic

No network, no GPU, nothing left behind. They test laws (a resumed run is the run, a permutation
permutes), and what concerns processes is tested with processes. Each section opens with its laws:
config.py; model.py, sampling; trainer.py (data, optimizer, the loop, watching); train.py;
a loopback Hub; diloco.py (the laws, alone, a folder, codecs, virtual time, the Hub, a bucket);
master.py and worker.py. Then come the programs behind the README's figures: study, crowd, bench,
size.
"""
import base64
import contextlib
import copy
import fcntl
import functools
import gzip
import hashlib
import heapq
import html
import io
import itertools
import json
import math
import os
import pty
import random
import re
import resource
import shlex
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import tracemalloc
import types
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import config as config_module
import diloco
import master as master_script
import model as model_module
import train
import trainer as trainer_module
import worker as worker_script
from config import load_config
from model import ChunkedCrossEntropy, build_model, register_model
from trainer import Trainer, TrainingError, build_data, draw, plot, read_checkpoint

HERE = Path(__file__).resolve().parent
TINY = ["--config=smoke", "--device=cpu", "--data.path=synthetic", "--d-model=32",
        "--block-size=16", "--vocab-size=64", "--eval-batches=2", "--logging.every-steps=1"]


PROCESSES = []      # that a test has started
PATIENCE = 900      # s; who waits so long has met a hang, not a busy machine


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    yield
    while PROCESSES:
        process = PROCESSES.pop()
        process.kill()
        process.wait()


def tiny(tmp_path, *flags):
    return load_config([*TINY, f"--output-dir={tmp_path}", *flags])


def make_trainer(config, model=None, data=None, **kwargs):
    torch.manual_seed(config["run"]["seed"])
    model = model or build_model(config["model"])
    return Trainer(model, config, *(data or build_data(config)), **kwargs)


def lines_of(folder, event):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def run_python(*args, cwd=HERE, **kwargs):
    return subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True,
                          timeout=PATIENCE, **kwargs)


def run_script(args, cwd, script="train.py", **kwargs):
    return run_python(HERE / script, *args, cwd=cwd, **kwargs)

# ---- config.py
# A flag is read as the type of its default, in any order, and wins over the named config.
# What is no setting, or no value for it, is refused in one line that names it.
# The help begins with what people use and shows every key.


@pytest.mark.parametrize("flag, section, key, value", [
    ("--lr=1", "optimizer", "lr", 1.0), ("--optimizer.lr=1e-3", "optimizer", "lr", 1e-3),
    ("--compile=false", "run", "compile", False), ("--compile=1", "run", "compile", True),
    ("--resume", "run", "resume", True), ("--name=2024", "run", "name", "2024"),
    ("--name=a=b", "run", "name", "a=b"), ("--name=true", "run", "name", "true"),
    ("--max-steps=2_000", "run", "max_steps", 2000),
    ("--scheduler.max_steps=7", "scheduler", "max_steps", 7),
    ("--betas=0.8,0.99", "optimizer", "betas", (0.8, 0.99)),
    ("--data.path=x=y", "data", "path", "x=y"),
    ("--node-id=a", "distributed", "node_id", "a"), ("--model.name=m:f", "model", "name", "m:f"),
    ("--max-steps 100", "run", "max_steps", 100), ("--config smoke", "run", "name", "smoke"),
    ("--resume --lr 1", "run", "resume", True), ("--compile False", "run", "compile", False),
])
def test_flag_is_read_as_the_type_of_its_default(flag, section, key, value):
    got = load_config(flag.split(" "))[section][key]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("flag, says", [
    ("--learning-rate=1", "nearest is --"), ("--optimizer.lrr=1", "nearest is --optimizer.lr"),
    ("--max-step=1", "run.max_steps"),
    ("--every-steps=5", "--checkpoint.every_steps or --logging.every_steps"),
    ("--max-steps=1e3", "whole number"),
    ("--lr=fast", "wants a number"), ("--compile=yes", "true or false"), ("--lr", "--lr=VALUE"),
    ("lr=1", "--key=value"), ("--betas=0.9", "numbers like 0.9,0.95"),
    ("--config=huge", "smoke, small, gpt2"), ("--target-batch-size=24", "not a multiple"),
    ("--n-head=3", "not divisible"), ("--n-kv-head=3", "not divisible"), ("--d-model=12", "odd"),
    ("--lr=nan", "finite"), ("--lr=-1", "not negative"), ("--lr=inf", "finite"),
    ("--betas=0.9,1.0", "below 1"), ("--betas=-0.1,0.9", "not negative"),
    ("--dropout=1", "below 1"), ("--precision=fp8", "auto, fp32, bf16, fp16"),
    ("--micro-batch-size=0", "at least 1"), ("--name=a/b", "folder name"),
    ("--name=a,b", "several runs"),
    ("--min-lr-ratio=2", "at most 1"), ("--optimizer.name=sgd", "adamw, muon"),
])
def test_bad_flag_is_one_clear_line(flag, says):
    with pytest.raises(ValueError) as e:
        load_config([flag])
    assert says in str(e.value) and "\n" not in str(e.value)
    assert (flag.split("=")[0].lstrip("-").split(".")[-1].replace("-", "_")
            in str(e.value).replace("-", "_") or "head" in str(e.value))


def test_order_of_flags_does_not_matter_and_command_line_wins():
    flags = ["--config=gpt2", "--lr=0.5", "--block-size=32"]
    one, two = load_config(flags), load_config(flags[::-1])
    assert (one == two and one["optimizer"]["lr"] == 0.5 and one["model"]["d_model"] == 768
            and one["run"]["name"] == "gpt2")
    assert load_config([])["run"]["name"] == "small"
    assert (one["data"]["accumulation"] == 8 and one["scheduler"]["max_steps"] == 20_000
            and one["model"]["d_ff"] == 2048)
    assert config_module.base["optimizer"]["lr"] == 1e-3, "a load must not change the defaults"


def test_help_begins_with_what_people_use_and_shows_every_key(capsys):
    with pytest.raises(SystemExit):
        load_config(["--config=gpt2", "--help"])
    first, of_gpt2, *sections = capsys.readouterr().out.split("\n\n")[2:]
    assert first.startswith("first\n  --config=small ") and first.count("\n") <= 15
    assert of_gpt2.startswith("what --config=gpt2 sets\n") and "--model.n_layer=12 " in of_gpt2
    for text, (section, values) in zip(sections, config_module.base.items(), strict=True):
        for key in values:
            assert re.search(rf"^  --{section}\.{key}=\S.*? +[a-z]+", text, re.M), key


def test_help_that_nobody_reads_to_its_end_is_no_error():
    code = "import config; config.load_config(['--help'])"      # as all three scripts do it
    p = subprocess.Popen([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
    p.stdout.close()
    assert (p.communicate(timeout=PATIENCE)[1], p.returncode) == ("", 0)

# ---- model.py
# It is a Llama: the same numbers as the published forward pass; the first loss is ln V.
# No token sees a later one; padding and ignored labels change nothing.
# Kernels, chunks, checkpointing and torch.compile change neither loss nor gradients.
# No device holds all logits, and a GPU computes in half precision.
# A wrong setting, and a checkpoint that cannot be represented, is refused by name, in one line.
# An export reads back as the same model, in transformers too. It keeps what its source says.


def reference_llama(state, c, ids):
    """The Llama forward pass as published,
    one head at a time and in float64: nothing shared with model.py."""
    w = {k: v.double() for k, v in state.items()}
    D, T = c["d_model"] // c["n_head"], ids.shape[1]

    def norm(x, weight):
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + c["norm_eps"]) * weight

    def rope(x):  # rotate_half
        freq = 1.0 / c["rope_base"] ** (torch.arange(0, D, 2).double() / D)
        angle = torch.outer(torch.arange(T).double(), torch.cat((freq, freq)))
        return x * angle.cos() + torch.cat((-x[..., D // 2:], x[..., :D // 2]), -1) * angle.sin()

    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["n_layer"]):
        p = f"model.layers.{i}."
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (h @ w[f"{p}self_attn.{n}_proj.weight"].t() for n in "qkv")
        heads = []
        for j in range(c["n_head"]):
            g = j * c["n_kv_head"] // c["n_head"]
            qj, kj, vj = (rope(q[..., j * D:(j + 1) * D]), rope(k[..., g * D:(g + 1) * D]),
                          v[..., g * D:(g + 1) * D])
            score = (qj @ kj.transpose(1, 2) / math.sqrt(D)).masked_fill(
                torch.ones(T, T).triu(1).bool(), -math.inf)
            heads.append(score.softmax(-1) @ vj)
        x = x + torch.cat(heads, -1) @ w[p + "self_attn.o_proj.weight"].t()
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = (h @ w[f"{p}mlp.{n}_proj.weight"].t() for n in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].t()
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].t()


SHAPE = dict(name="gpt", vocab_size=97, block_size=300, n_layer=2, n_head=4, n_kv_head=2,
             d_model=48, d_ff=80)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_the_model_is_a_llama(tied, n_kv_head):
    torch.manual_seed(1)
    m = build_model({**SHAPE, "tie_weights": tied, "n_kv_head": n_kv_head})
    for p in m.parameters():
        nn.init.normal_(p, std=0.2)
    ids = torch.randint(0, 97, (2, 300))
    want = reference_llama(m.state_dict(), m.config, ids)
    assert (m(ids)["logits"] - want).abs().max() < 1e-3 * want.abs().max()
    loss = F.cross_entropy(want[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1)
    assert abs(m(ids, labels=labels)["loss"] - loss) < 1e-4
    if tied:    # files leave the head out
        state, other = m.state_dict(), build_model(m.config)
        del state["lm_head.weight"]
        other.load_state_dict(state)
        assert other.lm_head.weight is other.model.embed_tokens.weight
        assert torch.equal(other.lm_head.weight, m.lm_head.weight)


@pytest.mark.parametrize("shape", [
    SHAPE, dict(SHAPE, qk_norm=True),
    dict(name="gpt", vocab_size=5000, d_model=768, n_head=4, n_layer=2, tie_weights=False)])
def test_first_loss_is_ln_vocab(shape):
    torch.manual_seed(0)
    m = build_model(shape)
    ids = torch.randint(0, shape["vocab_size"], (4, 129))
    assert abs(m(ids[:, :-1], labels=ids[:, 1:])["loss"].item()
               - math.log(shape["vocab_size"])) < 0.1


@pytest.mark.parametrize("plain", [True, False])
def test_causality(monkeypatch, plain):
    if plain:
        monkeypatch.setattr(model_module, "plain", lambda x: True)
        monkeypatch.setattr(model_module, "LONGEST", 0)
    m = build_model(SHAPE)
    one = torch.randint(0, 97, (1, 200))
    two = one.clone()
    two[:, 140:] = (two[:, 140:] + 1) % 97
    a, b = m(one)["logits"], m(two)["logits"]
    assert torch.equal(a[:, :140], b[:, :140]) and not torch.allclose(a[:, 140:], b[:, 140:])


@pytest.mark.parametrize("name, shapes", [
    ("rms_norm", [(3, 5, 8), (8,)]), ("rope", [(2, 3, 7, 8)]), ("attention", [(3, 9, 4)] * 3)])
def test_cpu_kernels_have_the_right_gradients(monkeypatch, name, shapes):
    monkeypatch.setattr(model_module, "ROWS", 4)
    torch.manual_seed(0)
    angles = torch.rand(7, 4, dtype=torch.float64)
    kernel = {"rms_norm": lambda x, w: model_module.CPUNorm.apply(x, w, 1e-5),
              "attention": model_module.CPUAttention.apply,
              "rope": lambda x: model_module.CPURotate.apply(x, angles.cos(), angles.sin())}[name]
    want = {"rms_norm": lambda x, w: F.rms_norm(x, (8,), w, 1e-5), "rope": None,
            "attention": lambda q, k, v:
                F.scaled_dot_product_attention(q, k, v, is_causal=True)}[name]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(kernel, inputs)
    if want:
        assert torch.allclose(kernel(*inputs), want(*inputs), atol=1e-6)


def test_torch_compile_sees_a_step_as_one_graph():
    m = build_model({**SHAPE, "qk_norm": True})
    ids = torch.randint(0, 97, (2, 64))
    want = m(ids, labels=ids)["loss"]
    # aot_eager: the whole trace, forward and backward, without a C++ compiler
    got = torch.compile(m, backend="aot_eager", fullgraph=True)(ids, labels=ids)["loss"]
    got.backward()
    assert torch.allclose(got, want, rtol=1e-5)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in m.parameters())


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    torch.manual_seed(0)
    m, ids, labels = build_model(SHAPE), *torch.randint(0, 97, (2, 2, 20))
    pad, real = torch.randint(0, 97, (2, 26)), torch.arange(26) < 20
    real = real.flip(0) if side == "left" else real
    padded, padded_labels = pad.clone(), pad.clone()
    padded[:, real], padded_labels[:, real] = ids, labels
    mask = real.long().expand(2, 26)
    assert torch.allclose(m(padded, attention_mask=mask)["logits"][:, real], m(ids)["logits"],
                          atol=1e-5)
    loss = m(padded, labels=padded_labels, attention_mask=mask)["loss"]
    assert torch.allclose(loss, m(ids, labels=labels)["loss"], atol=1e-6)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in m.parameters())


def test_ignored_labels_and_a_batch_without_any():
    m = build_model(SHAPE)
    ids, labels = torch.randint(0, 97, (2, 30)), torch.randint(0, 97, (2, 30))
    labels[0] = -100
    assert torch.allclose(m(ids, labels=labels)["loss"], m(ids[1:], labels=labels[1:])["loss"])
    loss = m(ids, labels=torch.full_like(labels, -100))["loss"]
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in m.parameters())


@pytest.mark.parametrize("wrong, says", [
    ({"n_layers": 2}, "model.n_layers is not a setting; the nearest is model.n_layer"),
    ({"attention_bias": "qkv"}, "the nearest is model.qkv_bias"), ({3: 3}, "model.3 is not"),
    ({"n_layer": "2"}, "model.n_layer='2' is no valid int; try 4"), ({"n_head": 0}, "n_head=0"),
    ({"d_ff": -64}, "model.d_ff=-64"), ({"tie_weights": 1}, "model.tie_weights=1 is no valid bool"),
    ({"norm_eps": math.nan}, "model.norm_eps=nan"), ({"dropout": None}, "model.dropout=None"),
    ({"rope_scaling": 8.0}, "model.rope_scaling=8.0"), ({"name": None}, "model.name=None"),
    ({"rope_base": math.inf}, "model.rope_base=inf"), ({"n_head": 5}, "d_model=256 must be n_head"),
    ({"d_model": 48, "n_head": 16}, "heads of an even size"),
    ({"n_kv_head": 3}, "a multiple of n_kv_head=3"),
    ({"block_size": 300}, "301 tokens is longer than block_size 300")])
def test_a_setting_that_is_wrong_is_named(wrong, says):
    with pytest.raises(ValueError, match=re.escape(says)) as e:
        build_model({"name": "gpt", **wrong})(torch.zeros(1, 301, dtype=torch.long))
    assert "\n" not in str(e.value)


def test_the_model_has_the_defaults_of_the_config():
    ours = config_module.base["model"]
    assert model_module.DEFAULTS == ours
    assert list(model_module.DEFAULTS) == list(ours), "in the same order"
    derived = load_config([])["model"]
    assert build_model({}).config == derived == build_model(derived).config
    assert build_model({"vocab_size": 50}).lm_head.weight.shape == (50, 256)
    assert build_model({"d_ff": 77, "rope_base": 5, "rope_scaling": [2, 1, 4, 64]}).config[
        "rope_scaling"] == (2.0, 1.0, 4.0, 64.0)


def test_ids_and_labels_of_any_whole_type():
    m = build_model(SHAPE)
    ids, mask = torch.randint(0, 97, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    for dtype in (torch.int32, torch.int16, torch.uint8, torch.uint16):
        other = ids.to(dtype)
        assert torch.equal(m(other)["logits"], m(ids)["logits"])
        assert torch.equal(m(other, labels=other, attention_mask=mask)["loss"],
                           m(ids, labels=ids, attention_mask=mask)["loss"])


def test_gradient_checkpointing_changes_nothing():
    m = build_model({**SHAPE, "dropout": 0.2})
    ids, grads = torch.randint(0, 97, (2, 31)), []
    for enabled in (False, True):
        m.set_gradient_checkpointing(enabled)
        m.zero_grad()
        torch.manual_seed(3)
        m(ids[:, :-1], labels=ids[:, 1:])["loss"].backward()
        grads.append([p.grad.clone() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_loss_in_chunks_equals_the_plain_loss(monkeypatch):
    monkeypatch.setattr(model_module, "CPU_LOGITS", 97 * 7)
    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(50, 16, requires_grad=True), torch.randn(97, 16, requires_grad=True))
    labels = torch.randint(0, 97, (50,))
    labels[::5] = -100
    plain = F.cross_entropy(hidden @ weight.t(), labels)
    want = torch.autograd.grad(plain * 3, (hidden, weight))
    chunked = ChunkedCrossEntropy.apply(hidden, weight, labels, True)
    got = torch.autograd.grad(chunked * 3, (hidden, weight))
    assert (torch.allclose(plain, chunked, rtol=1e-6)
            and all(torch.allclose(a, b, atol=1e-7) for a, b in zip(want, got)))


def test_rows_per_chunk_by_device(monkeypatch):
    rows = model_module.rows_per_chunk
    cpu, cuda, mps = (torch.device(d) for d in ("cpu", "cuda", "mps"))
    assert rows(cpu, 256) == 131072 and rows(cpu, 50304) == 667 and rows(cpu, 1 << 30) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rows(cuda, 50304) == 16384, "fake tensors, on a machine without a GPU"
    for memory, vocab_size, want in ((80, 50304, 16384), (24, 50304, 10672), (24, 151936, 3533)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties",
                            lambda d: types.SimpleNamespace(total_memory=memory * 2**30))
        assert rows(cuda, vocab_size) == want
    assert rows(mps, 50304) == 2668 and rows(mps, 151936) == 883


@contextlib.contextmanager
def cuda_autocast():
    """torch.autocast("cuda") turns itself off where there is no GPU; this does not."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("more", [{}, dict(qk_norm=True), dict(qkv_bias=True, tie_weights=False)])
def test_devices_and_dtypes_of_a_step_on_a_gpu_in_fake_tensors(more):
    """A torch built for CPUs alone has no autograd on fake cuda tensors (the process aborts). So
    here the forward pass runs without it, and the loss makes its gradients by a direct call. What
    autograd adds is tested on the meta device, below."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    ctx = types.SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    m = build_model({**SHAPE, **more, "vocab_size": 50304}).to("meta").requires_grad_(False)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        m.to_empty(device="cuda")
        ids = torch.empty(2, 300, dtype=torch.long, device="cuda")
        with cuda_autocast():
            logits, loss = m(ids)["logits"], m(ids, labels=ids)["loss"]
            hidden = m.hidden_states(ids, None, None).flatten(0, 1)
            again = ChunkedCrossEntropy.forward(ctx, hidden, m.lm_head.weight, ids.flatten(), True)
        grads = ChunkedCrossEntropy.backward(ctx, again)[:2]
    assert logits.shape == (2, 300, 50304) and logits.dtype == torch.bfloat16
    assert loss.dtype == again.dtype == torch.float32 and loss.shape == ()
    assert hidden.dtype == torch.bfloat16, "else the products of the loss are in fp32"
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]
    assert [g.shape for g in grads] == [hidden.shape, m.lm_head.weight.shape]
    assert {t.device.type for t in (logits, loss, hidden, again, *grads)} == {"cuda"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_eight_bytes_a_logit_of_one_chunk_at_a_time(device):
    """Counts the bytes of all tensors that are alive, in fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    alive, peak = {}, 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            nonlocal peak
            out = f(*args, **(kwargs or {}))
            storage = out.untyped_storage() if isinstance(out, torch.Tensor) else None
            if storage is not None and storage._cdata not in alive:
                alive[storage._cdata] = storage.nbytes()
                weakref.finalize(out, alive.pop, storage._cdata, 0)
                peak = max(peak, sum(alive.values()))
            return out
    ctx, vocab_size, width = types.SimpleNamespace(save_for_backward=lambda *t: 0), 50304, 2
    rows = model_module.rows_per_chunk(torch.device(device), vocab_size)
    with FakeTensorMode(), torch.no_grad():
        hidden = torch.empty(4 * rows, width, device=device, dtype=torch.bfloat16)
        weight = torch.empty(vocab_size, width, device=device)
        labels = torch.empty(4 * rows, dtype=torch.long, device=device)
        with Count():
            ChunkedCrossEntropy.forward(ctx, hidden, weight, labels, True)
    assert 6 < peak / (rows * vocab_size) < 8.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_on_the_meta_device(dtype):
    m = build_model({**SHAPE, "qk_norm": True}).to("meta", dtype)
    ids = torch.empty(2, 300, dtype=torch.long, device="meta")
    mask = torch.ones_like(ids)
    loss = m(ids, labels=ids, attention_mask=mask)["loss"]
    loss.backward()
    assert loss.device.type == "meta" and loss.dtype == torch.float32
    assert {(p.grad.device.type, p.grad.dtype) for p in m.parameters()} == {("meta", dtype)}


def test_numbers_too_small_to_matter_do_not_slow_a_step():
    build_model({**load_config(["--config=smoke"])["model"]})
    tiny = torch.full((300, 300), 1e-40)
    assert not (tiny * 1.0).any() and not (tiny @ tiny.fill_(1.0).mul_(1e-39)).any()


PRETRAINED = [dict(), dict(tie_weights=False, n_kv_head=4), dict(head_dim=16),
              dict(qkv_bias=True, tie_weights=False), dict(rope_base=5e5),
              dict(qk_norm=True, head_dim=8, tie_weights=False), dict(qk_norm=True, head_dim=16),
              dict(rope_scaling=(8.0, 1.0, 4.0, 64.0))]


def scrambled(shape):
    """A model with every tensor far from its initial value."""
    torch.manual_seed(3)
    m = build_model(shape).eval()
    for p in m.parameters():
        nn.init.normal_(p, std=0.2)
    return m


def exported(model, folder, tokenizer={}, ids={}, source=""):
    files = model_module.exported_files(model, tokenizer, ids, str(source))
    model_module.export(model, str(folder), files)
    return str(folder)


def start_from(folder, **more):
    c = {"init_from": str(folder), "block_size": 256, **more}
    return build_model({"name": "gpt", **c, **model_module.pretrained_config(c)["model"]}).eval()


@pytest.mark.parametrize("more", PRETRAINED)
def test_what_is_exported_is_where_training_can_start(tmp_path, more):
    m = scrambled({**SHAPE, **more, "block_size": 200})
    again = start_from(exported(m, tmp_path))
    same = m.config.keys() - {"init_from"}
    assert {k: again.config[k] for k in same} == {k: m.config[k] for k in same}
    ids = torch.randint(0, 97, (2, 200))
    assert torch.equal(again(ids)["logits"], m(ids)["logits"])
    state = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in state) is not m.config["tie_weights"]
    # the same in several files, with a head though it is tied, and with the angles of older files
    state |= {"lm_head.weight": m.lm_head.weight.detach().clone(),
              "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    (tmp_path / "model.safetensors").unlink()
    files = {k: f"part-{i % 3}.safetensors" for i, k in enumerate(sorted(state))}
    for file in set(files.values()):
        save_file({k: v for k, v in state.items() if files[k] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(start_from(tmp_path)(ids)["logits"], m(ids)["logits"])
    assert start_from(tmp_path, block_size=40).config["block_size"] == 40


def test_scaled_angles_are_those_of_llama_3():
    factor, low, high, context = 8.0, 1.0, 4.0, 128.0
    angles = model_module.rope_angles(dict(head_dim=16, rope_base=1e4, block_size=3,
                                           rope_scaling=(factor, low, high, context)))
    for i in range(8):
        freq = 1e4 ** (-i / 8)
        length = 2 * math.pi / freq
        if length > context / low:
            freq /= factor
        elif length > context / high:
            smooth = (context / length - low) / (high - low)
            freq = (1 - smooth) * freq / factor + smooth * freq
        assert abs(angles[2, i] / 2 - freq) < 1e-7


def refused(source, says):
    """init_from refuses in one line."""
    with pytest.raises((ValueError, OSError)) as e:
        start_from(source)
    assert "\n" not in str(e.value) and f"model.init_from={source}" in str(e.value)
    assert says in str(e.value)


@pytest.mark.parametrize("change, says", [
    ({"model_type": "gemma"}, "gemma is not supported, only llama, mistral, qwen2, qwen3"),
    # GPT-2 has other names for its sizes, too: what it is comes first
    ({"model_type": "gpt2", "hidden_size": None}, "model_type=gpt2 is not supported, only llama"),
    ({"model_type": None}, "model_type=None"), ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ({"attention_bias": True}, "attention_bias=True is not supported, only False"),
    ({"attention_bias": True, "model_type": "qwen3"}, "attention_bias=True is not"),
    ({"mlp_bias": True}, "mlp_bias=True is not supported, only False"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear is not"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn is not"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'low_freq_factor' is missing"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ({"model_type": "mistral", "sliding_window": 20}, "sliding_window=20"),
    ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 20}, "window=20"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": None}, "config.json cannot be used: 'hidden_size' is missing"),
    ({"num_attention_heads": "x"}, "model.n_head='x' is no valid int"),
    ({"rope_theta": 0.0}, "rope_base=0.0"), ({"rope_scaling": "x"}, "config.json"),
    ({"max_position_embeddings": "x"}, "config.json"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn"}}, "yarn"),
    ({"vocab_size": 98}, "model.embed_tokens.weight"),
    ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
    ({"num_hidden_layers": 1}, "no place"), ("{", "config.json"),
    ("[1, 2]", "config.json"), ("\xff", "config.json"), (None, "no config.json there; wanted is")])
def test_a_checkpoint_that_cannot_be_represented_is_refused_by_name(tmp_path, change, says):
    exported(build_model({**SHAPE, "tie_weights": False}), tmp_path)
    file = tmp_path / "config.json"
    if isinstance(change, dict):
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    elif change:
        file.write_text(change, encoding="latin-1")
    else:
        file.unlink()
    refused(tmp_path, says)


def test_weights_that_are_damaged_or_not_there_are_refused(tmp_path):
    folder = Path(exported(build_model(SHAPE), tmp_path))
    file = folder / "model.safetensors"
    weights = load_file(file)
    for change, says in ((lambda v: v.to(torch.int8), "int8"), (lambda v: v * math.nan, "finite")):
        save_file({k: change(v) if "norm" in k else v for k, v in weights.items()}, file)
        refused(folder, says)
    file.write_bytes(b"\0" * 100)
    refused(folder, file.name)
    file.rename(folder / "pytorch_model.bin")
    refused(folder, "no model.safetensors there; wanted is a whole model, saved by transformers")
    index = folder / "model.safetensors.index.json"
    for content in ("{}", "[]", "{", '{"weight_map": null}', '{"weight_map": {"a": 1, "b": "x"}}'):
        index.write_text(content)
        refused(folder, "no 1 there" if "1" in content else index.name)
    refused("/nowhere", "no such folder")


def test_checkpoints_without_their_packages_are_one_line(tmp_path, monkeypatch):
    folder, m = exported(build_model(SHAPE), tmp_path / "in"), build_model(SHAPE)
    for name, trial in (("safetensors.torch", lambda: start_from(folder)),
                        ("huggingface_hub", lambda: start_from("user/name")),
                        ("huggingface_hub", lambda: model_module.export(m, str(tmp_path), {}))):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ValueError, match=f"pip install {name.split('.')[0]}$"):
                trial()


def test_flags_against_a_pretrained_shape(tmp_path):
    flags = [f"--init-from={exported(build_model(SHAPE), tmp_path)}", "--block-size=100"]
    shape = model_module.pretrained_config(load_config(flags)["model"])
    config = load_config([*flags, "--dropout=0.1"], pretrained=shape)
    assert config["model"]["d_ff"] == 80 and config["model"]["block_size"] == 100
    for flag in ("--d-model=64", "--block-size=400"):
        with pytest.raises(ValueError, match="model.init_from has"):
            load_config([*flags, flag], pretrained=shape)
    with pytest.raises(ValueError, match="model.name=other"):
        load_config([*flags, "--model.name=other"])


def test_what_no_family_has_is_not_exported():
    for model, says in ((nn.Linear(1, 1), "a Linear cannot be exported"),
                        (build_model({"qkv_bias": True, "qk_norm": True}),
                         "no family has model.qkv_bias together with model.qk_norm")):
        with pytest.raises(ValueError, match=says):
            model_module.exported_files(model, {}, {})


@pytest.mark.parametrize("family, dtype, more", [
    ("Llama", torch.float32, {}), ("Llama", torch.bfloat16, dict(tie_word_embeddings=True)),
    ("Llama", torch.float32, dict(head_dim=16, rope_theta=5e5)),
    ("Llama", torch.bfloat16, dict(rope_scaling=dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32))),
    ("Qwen2", torch.float32, {}), ("Mistral", torch.float32, dict(sliding_window=None)),
    ("Mistral", torch.bfloat16, dict(sliding_window=128)),
    ("Qwen3", torch.bfloat16, dict(head_dim=16)),
    ("Qwen3", torch.float32, dict(head_dim=8, tie_word_embeddings=True)),
    ("Qwen3", torch.float32, dict(head_dim=12, num_key_value_heads=4))])
def test_transformers_models_come_in_and_go_out(tmp_path, family, dtype, more):
    transformers = pytest.importorskip("transformers", reason="an optional check")
    torch.manual_seed(0)
    theirs = getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128,
        **{"num_key_value_heads": 2, **more})).eval()
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.2)
    theirs.to(dtype).save_pretrained(tmp_path / "in", max_shard_size="40KB")
    ours = start_from(tmp_path / "in")
    exported(ours, tmp_path / "out", source=tmp_path / "in")
    read = transformers.AutoModelForCausalLM.from_pretrained
    back, theirs = read(tmp_path / "out"), read(tmp_path / "in", dtype=torch.float32)
    assert type(back) is type(theirs) and back.dtype == torch.float32
    ids = torch.randint(0, 97, (2, 128))
    with torch.no_grad():
        for other in (theirs, back):
            assert (ours(ids)["logits"] - other(ids).logits).abs().max() < 1e-4


TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=3)


def json_of(folder, name):
    return json.loads((Path(folder) / name).read_text())


def test_an_export_keeps_what_its_source_says(tmp_path, capsys):
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=128)
    source = Path(exported(build_model({**SHAPE, "block_size": 300,
                                        "rope_scaling": (8.0, 1.0, 4.0, 128.0)}), tmp_path / "in"))
    config = json_of(source, "config.json")
    assert config["rope_scaling"] == scaling and config["eos_token_id"] is None
    assert config["sliding_window"] is None, "transformers assumes one for Mistral"
    assert not (source / "generation_config.json").exists(), "no tokens, nothing to say"
    config |= dict(bos_token_id=5, eos_token_id=[6, 7], pad_token_id=None)
    (source / "config.json").write_text(json.dumps(config))
    (source / "generation_config.json").write_text('{"eos_token_id": [6, 7],\n "top_p": 0.9}')
    tuned = start_from(source, block_size=64)
    files = {"tokenizer.json": b"{}", "chat_template.jinja": b"x"}
    out = exported(tuned, tmp_path / "out", files, TOKENS, source)
    got = json_of(out, "config.json")
    assert tuned.config["block_size"] == 64 and got["max_position_embeddings"] == 300
    assert got["rope_scaling"] == scaling, "the old context is not that of this run"
    assert (got["bos_token_id"], got["eos_token_id"], got["pad_token_id"]) == (5, [6, 7], 3)
    assert ((tmp_path / "out/generation_config.json").read_bytes()
            == (source / "generation_config.json").read_bytes())
    assert (tmp_path / "out/chat_template.jinja").read_bytes() == b"x"
    # again, from the export
    again = exported(start_from(out, block_size=32), tmp_path / "again", source=out)
    assert json_of(again, "config.json") == got
    assert not json_of(exported(tuned, out), "config.json")["eos_token_id"]
    assert not (tmp_path / "out/generation_config.json").exists(), "that of the export before"
    # without a source, and with one that is gone or no checkpoint
    capsys.readouterr()
    for gone in ("", tmp_path / "nowhere", tmp_path):
        alone = exported(tuned, tmp_path / "alone", {}, TOKENS, gone)
        got = json_of(alone, "config.json")
        assert got["max_position_embeddings"] == 64 and got["eos_token_id"] == 2
        assert json_of(alone, "generation_config.json") == TOKENS
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and all(line.startswith("notice   the export keeps no") for line in said)


def test_a_batched_pipeline_runs_on_an_export(tmp_path):
    transformers = pytest.importorskip("transformers", reason="an optional check")
    tokenizers = pytest.importorskip("tokenizers", reason="an optional check")
    words = {"<pad>": 3, "<eos>": 2, "a": 4, "b": 5, "c": 6, "?": 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", pad_token="<pad>", eos_token="<eos>",
                    padding_side="left")
    files = {"tokenizer.json": tokenizer.to_str().encode(),
             "tokenizer_config.json": json.dumps(settings).encode()}
    ids = dict(eos_token_id=2, pad_token_id=3)
    folder = exported(scrambled(dict(SHAPE, vocab_size=7)), tmp_path, files, ids)
    pipe = transformers.pipeline("text-generation", model=folder)
    texts, limit = ["a", "a b c a b c a"], dict(max_new_tokens=8, do_sample=False)
    batched = pipe(texts, batch_size=2, **limit)
    assert batched == [pipe(text, **limit) for text in texts]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_an_export_has_ordinary_permissions_and_leaves_no_old_shards(tmp_path):
    old = os.umask(0o027)
    try:
        m = scrambled(SHAPE)
        for size in ("20KB", "60KB", "5GB"):
            model_module.export(m, tmp_path, model_module.exported_files(m, {}, {}), size)
            assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o640}
            ids = torch.arange(90)[None]
            assert torch.equal(start_from(tmp_path)(ids)["logits"], m(ids)["logits"])
            shards = len(list(tmp_path.glob("*.safetensors")))
            assert (tmp_path / "model.safetensors.index.json").exists() is (shards > 1)
            nn.init.normal_(m.model.norm.weight)
    finally:
        os.umask(old)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_an_export_that_cannot_be_written_is_one_line(tmp_path):
    def fails(folder):
        with pytest.raises(OSError) as e:
            exported(build_model({"d_model": 64}), folder)
        assert str(e.value).startswith(f"cannot write {folder}: ") and "\n" not in str(e.value)
    (tmp_path / "file").write_text("")
    fails(tmp_path / "file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # a write past this size fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        fails(tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_bytes_have_a_tokenizer_that_transformers_reads(tmp_path):
    config = load_config(["--config=smoke"])
    files, ids = trainer_module.tokenizer_files(config)
    assert ids == {"pad_token_id": 0}
    vocab = json.loads(files["tokenizer.json"])["model"]["vocab"]
    assert set(vocab.values()) == set(range(256)) and vocab["A"] == 65 and vocab["Ġ"] == 32
    transformers = pytest.importorskip("transformers", reason="an optional check")
    m = build_model(config["model"])
    for p in m.parameters():
        p.data *= 2
    folder = exported(m, tmp_path, files)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("def f(x):\n\t return  x", "é😀ﬁ ‏עברית\r\n", "a . b ,c ' s n't <s>",
                 "".join(map(chr, range(300)))):
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config["sample"]["temperature"] = 0.0
    want = theirs.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=50,
                           do_sample=False)[0].tolist()
    assert trainer_module.generate(m, list(b"def "), config, 50) == want

# ---- sampling
# The cache changes nothing but the time. top_k, top_p and temperature draw from what they should.
# A model is found by its name; what is none is refused by name.


class NoCache(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids)


@pytest.mark.parametrize("more", [
    {}, dict(n_kv_head=1, qkv_bias=True), dict(n_kv_head=1, head_dim=16, qk_norm=True)])
def test_the_cache_changes_nothing(tmp_path, more):
    m = scrambled({**SHAPE, **more, "block_size": 60})
    ids, cache = torch.randint(0, 97, (2, 60)), {}
    with torch.no_grad():
        parts = [m(part, cache=cache)["logits"] for part in ids.split([7, 1, 20, 1, 31], 1)]
        assert (torch.cat(parts, 1) - m(ids)["logits"]).abs().max() < 1e-4
    # the same with autograd on, as in an interactive session; there is no gradient then
    kept = {}
    for part, want in zip(ids.split([7, 1, 20, 1, 31], 1), parts):
        got = m(part, cache=kept)["logits"]
        assert torch.equal(got, want) and not got.requires_grad
    with pytest.raises(ValueError, match="61 tokens"):
        m(ids[:, :1], cache=cache)
    config = tiny(tmp_path, "--vocab-size=97", "--block-size=60", "--seed=5")
    for settings in ({}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}):
        config["sample"].update(settings)
        texts = [trainer_module.generate(each, [1, 2, 3], config, 90)
                 for each in (m, NoCache(m))]
        assert texts[0] == texts[1] and len(texts[0]) == 93, "also past block_size"


def test_top_k_and_top_p_and_temperature():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()

    def seen(**settings):
        c, generator = {**config_module.base["sample"], **settings}, torch.Generator()
        return {trainer_module.pick(logits, c, generator) for _ in range(300)}
    assert seen(temperature=1.0) == {0, 1, 2, 3} and seen(temperature=0.0) == {1}
    assert seen(top_k=2) == {1, 2} and seen(top_k=1) == {1} == seen(top_p=0.01)
    assert seen(temperature=1.0, top_p=0.5) == {1} and seen(temperature=1.0, top_p=0.6) == {1, 2}
    # of the two that top_k leaves, the first has 2 / 3
    assert seen(temperature=1.0, top_k=2, top_p=0.66) == {1}
    draws = [trainer_module.pick(logits, {**config_module.base["sample"], "temperature": 1.0}, g)
             for g in [torch.Generator().manual_seed(0)] for _ in range(4000)]
    assert abs(draws.count(1) / 4000 - 0.5) < 0.04


def test_registry(tmp_path, monkeypatch):
    @register_model("test_only")
    def factory(config):
        return nn.Linear(config["d_model"], 1)
    assert build_model({"name": "test_only", "d_model": 3, "of_mine": 1}).in_features == 3
    del model_module.MODELS["test_only"]
    (tmp_path / "mine_for_test.py").write_text(
        "import torch\ndef make(c): return torch.nn.Linear(2, 2)\nwrong = dict\n")
    (tmp_path / "broken_for_test.py").write_text("this is no python\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_model({"name": "mine_for_test:make"}).in_features == 2
    for name, says in [("nope", "gpt, reference_transformer"),
                       ("no_such_module:f", "no_such_module"), ("mine_for_test:other", "other"),
                       ("broken_for_test:f", "SyntaxError"), (":", "model.name=:"),
                       ("mine_for_test:wrong", "not an nn.Module")]:
        with pytest.raises(ValueError, match=re.escape(says)):
            build_model({"name": name})


# ---- trainer.py: data
# A sample depends on seed, node and counter alone; an epoch sees each item once.
# Validation is never trained on. What a run writes is no data. A link is followed once.
# Each kind of file gives the same documents, in bounded memory; what is no text is refused by name.
# The tokens of the pieces of a text are those of the whole; they are made once for each source.
# An export has the tokenizer's files, and a token that fills up a batch.


def put(folder, contents):
    """Write {name: text or bytes} below a folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 4097])
def test_a_permutation_permutes(n):
    a, b = ([trainer_module.permute(i, n, key) for i in range(n)] for key in (1, 2))
    assert sorted(a) == sorted(b) == list(range(n)) and (n < 10 or a != b)


def test_an_epoch_sees_all_and_nodes_differ_and_validation_is_disjoint(tmp_path):
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "data.bin")
    flags = [f"--data.path={tmp_path}/data.bin", "--vocab-size=65536"]
    (train, val), (again, _), (other, _) = (
        build_data(tiny(tmp_path, *flags, *more)) for more in ([], [], ["--node-id=b"]))
    ids = torch.stack([train[i]["input_ids"] for i in range(len(train))])
    assert len(train) == 4499 // 16
    assert torch.equal(train[7]["input_ids"][1:], train[7]["labels"][:-1])
    assert len(ids.unique()) > 0.99 * 4500 and ids.max() < 4500
    assert min(val[i]["input_ids"].min() for i in range(len(val))) >= 4500
    assert all(torch.equal(train[i]["labels"], again[i]["labels"]) for i in (0, 3, 1000, 10**9))
    assert sum(torch.equal(train[i]["labels"], other[i]["labels"]) for i in range(50)) < 10
    assert not torch.equal(ids[0], train[len(train)]["input_ids"]), "another epoch, another order"


def text_of(path):
    """The Text of a data.tokenizer."""
    return trainer_module.Text({"data": {"tokenizer": str(path)}})


def opened(path, *flags):
    """The tokens of data.path, as an array."""
    config = tiny(Path(path).parent, f"--data.path={path}", *flags)
    source = trainer_module.open_tokens(config, "path", trainer_module.Text(config))
    return source.read(0, len(source))


def test_token_files(tmp_path):
    tokens = np.arange(2000) % 250
    odd = np.append(0x280, tokens[1:])      # the first bytes may be those of anything: of a pickle
    for name, values, dtype, header in [
            ("nanogpt.bin", tokens, "<u2", []), ("odd.bin", odd, "<u2", []),
            ("gpt2.bin", tokens, "<u2", [20240520, 1, 2000] + [0] * 253),
            ("llama3.bin", tokens, "<u4", [20240801, 7, 2000] + [0] * 253)]:
        put(tmp_path, {name: np.array(header, "<i4").tobytes() + values.astype(dtype).tobytes()})
        assert np.array_equal(opened(tmp_path / name), values), name
    np.save(tmp_path / "t.npy", tokens.astype(np.int32))
    assert np.array_equal(opened(tmp_path / "t.npy"), tokens)
    # uint16 cannot hold 109097, which would be read as 43561, 1
    np.array([109097, 5] * 500, "<u4").tofile(tmp_path / "wide.bin")
    with pytest.raises(ValueError, match="is above 65,536"):
        opened(tmp_path / "wide.bin", "--vocab-size=128256")


DOCS = ["Es war einmal\nein K\u00f6nig.\n", "a, \"b\"\r\n\r\nc", "x" * 3000, "\u4f60 \U0001f600"]


def test_documents_of_every_kind_of_file_with_and_without_a_tokenizer(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    # the same four documents in each, with rows without a text between them
    rows = [{"id": i, "text": text} for i, text in enumerate([DOCS[0], None, *DOCS[1:], ""])]
    lines = ("\ufeff" + "\n\n".join(json.dumps(row) for row in rows)).encode()
    files = {"a.jsonl": lines, "a.ndjson": lines, "a.JSONL.gz": gzip.compress(lines)}
    put(tmp_path, files)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    tokenizer_of(tmp_path / "t")
    text = text_of(tmp_path / "t")
    whole = [i for document in DOCS for i in [*text.encode(document), text.eos]]
    want = b"".join(text.encode() + b"\n\n" for text in DOCS)
    for block in (trainer_module.BLOCK, 7):
        monkeypatch.setattr(trainer_module, "BLOCK", block)
        for name in [*files, "a.parquet"]:
            assert bytes(opened(tmp_path / name)) == want, name
            assert opened(tmp_path / name, f"--data.tokenizer={tmp_path}/t").tolist() == whole
            shutil.rmtree(tmp_path / "tokens")      # with the other size they are made again
    # plain text: as it is, one file after another
    put(tmp_path / "d", {"a.txt": "Hello ", "deep/b.txt": "World\n", "deep/empty.txt": "",
                         "deep/c.md.gz": gzip.compress(b"\xef\xbb\xbf# packed")})
    for path in (tmp_path / "d", f"{tmp_path}/d/**/*.txt"):
        assert bytes(opened(path)).endswith(b"Hello World\n")
    assert bytes(opened(tmp_path / "d/deep")) == b"# packed\n\nWorld\n"
    put(tmp_path, {"body.jsonl": '{"body": "only this"}\n'})
    assert bytes(opened(tmp_path / "body.jsonl", "--data.text-column=body")) == b"only this\n\n"


def test_memory_stays_bounded(tmp_path):
    line = json.dumps({"text": "spam and eggs " * 200})
    for name, end in (("a.jsonl.gz", "\n"), ("one_line.txt.gz", "")):
        put(tmp_path, {name: gzip.compress((line + end).encode() * 10_000, 1)})     # 28 MB
        tracemalloc.start()
        opened_length = len(build_data(tiny(tmp_path, f"--data.path={tmp_path / name}",
                                            "--vocab-size=256"))[0])
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # most of what is there is a block of it in three forms
        assert opened_length > 1e6 and most < 12e6, (name, most)


PNG = b"\x89PNG\r\n\x1a\n" + bytes(300)
TEXT = "The quick brown fox jumps over the lazy dog.\n" * 90


@pytest.mark.parametrize("name, content, says", [
    ("a.txt", TEXT.encode("utf-16"), "UTF-16 text"),
    ("a.txt", TEXT.encode("utf-16-le"), "byte 1 is zero"),
    ("a.txt", (TEXT + "caf\xe9s").encode("latin-1"), "not UTF-8 text at byte 4,053"),
    ("a.txt", TEXT.encode() + b"\xe2\x82", "not UTF-8 text at byte 4,050: unexpected end"),
    ("a.txt", TEXT.encode() + b"\0", "byte 4,050 is zero"),
    ("noname", random.Random(0).randbytes(5000), "not"), ("a.png", PNG, "an image"),
    ("a.txt.gz", gzip.compress(PNG), "an image"),
    ("a.txt.gz", gzip.compress(TEXT.encode())[:-20], "end-of-stream"),
    ("a.txt.gz", TEXT.encode(), "Not a gzipped file"),
    ("a.txt", gzip.compress(TEXT.encode()), "gzip"),
    ("a.bin.gz", gzip.compress(bytes(100)), "byte 0 is zero"),
    ("a.npz", b"PK\x03\x04" + bytes(300), "a zip archive"),
    ("a.bin", b"PK\x03\x04" + bytes(300), "a zip archive, as are PyTorch's weights"),
    ("a.tar", b"a".ljust(257, b"\0") + b"ustar\x0000", "byte 1 is zero"),
    ("a.pdf", b"%PDF-1.7\n", "a PDF"), ("a.pkl", b"\x80\x04\x95", "a Python pickle"),
    ("m.safetensors", struct.pack("<Q", 60) + b'{"w":', "a file of model weights"),
    ("a.parquet", TEXT.encode(), "a.parquet, row 1: Parquet magic"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "cut\n', "a.jsonl, row 2: no JSON object"),
    ("a.jsonl", b'{"text": "x"}\n\n[1]\n', "a.jsonl, row 3: no JSON object"),
    ("a.json", b'[\n{"text": "x"}]\n', "a.json, row 1: no JSON object"),
    ("a.jsonl", b"[" * 99999, "row 1: no JSON object"),
    ("a.jsonl", b'{"text": "x"}\n{"text": 5}\n', "row 2: 'text' is of type int, not text"),
    ("a.jsonl", b'{"text": "\\ud800"}\n', "row 1: 'utf-8' codec can't encode"),
    ("a.jsonl", b'{"body": "x", "id": 5}\n', "row 1: no column 'text'; there are body, id"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "row 2: no JSON object in UTF-8"),
    ("a.csv", b"id,text\n1,x\n", 'a.csv: convert it to .jsonl, one {"text": ...} a line'),
    ("a.tsv.gz", gzip.compress(b"text\nx\n"), "a.tsv.gz: convert it"),
    ("a.jsonl", b'{"text": null}\n{"text": ""}', "is empty"), ("a.jsonl", b"\n", "is empty")])
def test_what_is_no_text_is_refused_by_name(tmp_path, name, content, says):
    put(tmp_path / "d", {name: content, "0.txt": ""})   # the folder is refused for one file, too
    tokenizer_of(tmp_path / "t")
    for path in (f"{tmp_path}/d/{name}", f"{tmp_path}/d"):
        for more in ([], [f"--data.tokenizer={tmp_path}/t"]):
            with pytest.raises(ValueError) as e:
                opened(path, *more)
            assert says in str(e.value) and "\n" not in str(e.value), e.value
            assert name in str(e.value) or says == "is empty"
    assert says == "is empty" or not list((tmp_path / "tokens").glob("*.npy"))


def test_parquet_has_its_refusals(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    path = tmp_path / "a.parquet"
    for name, column, says in [("body", ["x"], "no column 'text'; there are body"),
                               ("text", [1, 2], "row 1: 'text' is of type int, not text"),
                               ("text", [b"x"], "row 1: 'text' is of type bytes, not text"),
                               ("text", [{"en": "x"}], "row 1: 'text' is of type dict, not text")]:
        parquet.write_table(pa.table({name: column}), path)
        with pytest.raises(ValueError, match=re.escape(says)):
            opened(path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 40 + content[44:])
    with pytest.raises(ValueError, match="a.parquet, row 1: "):
        opened(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="a.parquet, row 1: this needs a package: pip install"):
        opened(path)


def names_of(path):
    return list(trainer_module.find_files(load_config([f"--data.path={path}"]), "path"))


def test_paths_as_people_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    put(tmp_path, dict.fromkeys((
        "texts [v2]/a.txt", "texts [v2]/b.md", "texts [v2]/deep/c.txt", "odd [1].txt", "odd 1.txt",
        "d/.git/x", "d/.hidden", "d/__pycache__/x.pyc", "d/a.txt"), "text"))
    for path, names in [
            ("texts [v2]", ["a.txt", "b.md", "deep/c.txt"]), ("texts [v2]/*.txt", ["a.txt"]),
            ("texts [v2]/**", ["a.txt", "b.md", "deep/c.txt"]), ("d", ["a.txt"]),
            ("texts [v2]/**/*.txt", ["a.txt", "deep/c.txt"]),
            ("texts [v2]/d*/*", ["deep/c.txt"]), ("texts*/*.txt", ["texts [v2]/a.txt"]),
            ("**/c.txt", ["texts [v2]/deep/c.txt"]),
            ("~/texts [v2]/?.md", ["b.md"]), ("odd [1].txt", ["odd [1].txt"]), ("~/d", ["a.txt"]),
            (f"{tmp_path}/odd*.txt", ["odd 1.txt", "odd [1].txt"])]:
        assert names_of(path) == names, path
    for path in ("nowhere", "no*.txt", "d/no/a.txt", "texts [v2]/[", "", "/dev/null", "~nobody/x"):
        with pytest.raises(FileNotFoundError, match="nothing there"):
            names_of(path)


def test_links_are_followed_once_and_the_runs_own_folder_is_no_data(tmp_path, monkeypatch):
    put(tmp_path, dict.fromkeys(("elsewhere/far.txt", "data/near.txt", "data/runs/old/step.pt",
                                 "data/out/x.bin", "data/hub/x.json"), "text"))
    for link, to in {"linked": "../elsewhere", "loop": ".", "up": "../data", "b": "near.txt",
                     "itself": "itself", "gone": "nowhere", "z": "linked",
                     "z.txt": "../elsewhere/far.txt"}.items():
        (tmp_path / "data" / link).symlink_to(to)
    monkeypatch.chdir(tmp_path / "data")
    for path in (".", "**", "**/*.txt", f"{tmp_path}/data"):
        config = load_config([f"--data.path={path}", "--hub=./hub", "--export=out"])
        found = [os.path.realpath(f) for f in trainer_module.find_files(config, "path").values()]
        assert sorted(found) == [f"{tmp_path}/data/near.txt", f"{tmp_path}/elsewhere/far.txt"]
    assert names_of("runs/old") == ["step.pt"], "who asks for it gets it"


def test_the_data_line(tmp_path, monkeypatch, capsys):
    tokenizer_of(tmp_path / "t")
    put(tmp_path, {"a.txt": TEXT, "b.jsonl": json.dumps({"text": "word " * 200}) + "\n",
                   "c.bin": bytes(1000), "d/a.txt": TEXT,
                   "d/b.jsonl": json.dumps({"text": TEXT}) + "\n"})
    monkeypatch.chdir(tmp_path / "d")
    token = f"--data.tokenizer={tmp_path}/t"
    n = len(text_of(tmp_path / "t").encode(TEXT)) + 1

    def line(*flags):
        build_data(tiny("runs", "--vocab-size=256", *flags))
        (said,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("data ")]
        return said[9:].replace(str(tmp_path), "D")
    end = " | the last tenth is held out"
    assert line(f"--data.path={tmp_path}/a.txt") == (
        "D/a.txt | files: 1 text | documents: 1 | bytes: 4,050" + end)
    assert line(f"--data.path={tmp_path}/a.txt", token) == (
        f"D/a.txt | files: 1 text | documents: 1 | bytes: 4,050, {4050 / n:.2f} per token"
        f" | tokens: {n:,}" + end)
    assert line(f"--data.path={tmp_path}/c.bin", f"--val-path={tmp_path}/b.jsonl") == (
        "D/c.bin | files: 1 token | tokens: 500 | validation: D/b.jsonl | "
        "files: 1 jsonl | documents: 1 | bytes: 1,002")
    assert line() == "synthetic | endless" + end
    assert re.fullmatch(r"stdlib \| files: [\d,]+ text \| documents: [\d,]+ \| bytes: [\d,]+"
                        + re.escape(end), line("--data.path=stdlib"))
    for _ in range(2):      # what a run writes into the folder is not read the next time
        assert line("--data.path=.") == (
            ". | files: 1 jsonl, 1 text | documents: 2 | bytes: 8,102" + end)
    assert list(Path("runs/tokens").glob("*.npy"))


def test_data_that_changed_is_named(tmp_path):
    def print_of(files, *flags):
        shutil.rmtree(tmp_path / "d", ignore_errors=True)
        put(tmp_path / "d", files)
        flags = [f"--data.path={tmp_path}/d", "--vocab-size=256", *flags]
        return build_data(tiny(tmp_path, *flags))[0].fingerprint
    change, text = trainer_module.data_change, "x" * 1000
    before = print_of({"a.txt": text})
    assert before == {"tokens": 1000, "first": 0, "windows": 899 // 16, "digest": before["digest"]}
    assert json.loads(json.dumps(before)) == before
    assert change(before, print_of({"a.txt": text})) == ""
    assert re.fullmatch(r"the data has changed \(tokens 1000 -> 2000, windows 56 -> 112, digest .*"
                        r"\): the order of the windows is a new one from here on",
                        change(before, print_of({"a.txt": text * 2})))
    assert "(windows 56 -> 31)" in change(before, print_of({"a.txt": text}, "--block-size=29"))
    assert "changed (digest " in change(before, print_of({"a.txt": "x" * 500, "b.txt": "x" * 500}))
    assert change({}, before) == "" == change(None, before)
    print_of({"a.txt": text})
    (tmp_path / "d").rename(tmp_path / "moved")     # the folder may have moved
    config = tiny(tmp_path, f"--data.path={tmp_path}/moved", "--vocab-size=256")
    assert build_data(config)[0].fingerprint == before


def test_a_dataset_repo_is_read_by_its_data_files_and_its_train_split():
    def choose(*names, wanted=("train",)):
        return trainer_module.choose(sorted(names), wanted)
    beside = ["README.md", ".gitattributes", "LICENSE", "LICENSE.txt", "dataset_infos.json",
              "images/x.png", "load.py"]
    split = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet",
             "data/test-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet"]
    assert choose(*beside, *split) == split[:2] == choose(*beside, *split, "train.jsonl", "t.bin")
    assert choose(*split, wanted=("validation", "test")) == split[3:]
    assert choose(*split[:3], wanted=("validation", "test")) == split[2:3]
    assert choose("train.jsonl.gz", "dev.jsonl.gz", "valid.txt") == ["train.jsonl.gz"]
    assert choose("train/a.txt", "train/b.txt", "test/a.txt") == ["train/a.txt", "train/b.txt"]
    assert choose("2020/a.jsonl", "2021/a.jsonl", "x.txt") == ["2020/a.jsonl", "2021/a.jsonl"]
    assert choose("a.txt", "trainer.txt", "contest.txt") == ["a.txt", "contest.txt", "trainer.txt"]
    assert choose("x.bin", "y.npy") == ["x.bin", "y.npy"] and choose(*beside) == []
    for names, says in [(["en/train.jsonl", "de/train.jsonl"], "2 configurations (de, en)"),
                        (["test.jsonl", "dev.jsonl"], "no train split, only test, validation")]:
        with pytest.raises(ValueError, match=re.escape(says)):
            choose(*names)


def test_a_dataset_repo_end_to_end_with_a_stand_in_for_the_hub(tmp_path, monkeypatch, capsys):
    import huggingface_hub
    repo, top = tmp_path / "repo", "datasets/user/name"
    put(repo, {"README.md": "# card", "t.bin": "abcd",
               "data/train.jsonl": '{"text": "train me, too"}\n' * 40,
               "data/test.jsonl": '{"text": "test"}\n' * 40})

    class Files:
        """What is used of HfFileSystem, over a folder."""
        def local(self, path):
            return path.removeprefix("hf://").removeprefix(top).lstrip("/")

        def isdir(self, path):
            if "/gone" in path:
                raise OSError("Repository Not Found\nfor url: https://...")
            return (repo / self.local(path)).is_dir()

        def find(self, path):
            return self.glob(f"{path}/**/*.*")

        def glob(self, path):
            return [f"{top}/{f.relative_to(repo)}" for f in repo.glob(self.local(path))]

        def resolve_path(self, path):
            return types.SimpleNamespace(repo_id="user/name", repo_type="dataset", revision="main",
                                         path_in_repo=self.local(path))
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download",
                        lambda repo_id, path, repo_type, revision: str(repo / path))
    config = tiny(tmp_path, f"--data.path=hf://{top}", f"--val-path=hf://{top}", "--vocab-size=256")
    train_data, val_data = build_data(config)
    assert bytes(train_data.source.read(0, 14)) == b"train me, too\n"
    assert bytes(val_data.source.read(0, 12)) == b"test\n\ntest\n\n"
    out = capsys.readouterr().out
    assert f"notice   hf://{top}: reading 1 of its 4 files" in out
    assert f"data     hf://{top} | files: 1 jsonl | documents: 40" in out
    for path, names in [(f"hf://{top}/data/test.jsonl", ["data/test.jsonl"]),
                        (f"hf://{top}/data/*", ["data/test.jsonl", "data/train.jsonl"]),
                        (f"hf://{top}/data", ["train.jsonl"])]:
        assert sorted(names_of(path)) == names
    for path, says in [("hf://datasets/user/gone", "cannot be read: Repository Not Found for"),
                       (f"hf://{top}/no.txt", "nothing there")]:
        with pytest.raises(OSError, match=says) as e:
            names_of(path)
        assert "\n" not in str(e.value)


def test_a_users_dataset_is_seen_once_an_epoch(tmp_path):
    config = tiny(tmp_path, "--micro-batch-size=2", "--target-batch-size=4")
    found = trainer_module.batches([torch.full((4,), i) for i in range(7)], config, 0)
    seen = [int(row[0]) for batch, _ in zip(found, range(7)) for row in batch["input_ids"]]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7)) and seen[:7] != seen[7:]


def test_validation_files_are_left_out_of_training_and_hidden_ones_are_not_read(tmp_path):
    put(tmp_path, {"d/a.txt": "a" * 500, "d/val.txt": "v" * 500, "d/.git/x": "x" * 500,
                   "short.txt": "short"})
    flags = [f"--data.path={tmp_path}/d", "--vocab-size=256"]
    train, val = build_data(tiny(tmp_path, *flags, f"--val-path={tmp_path}/d/val.txt"))
    assert {int(i) for k in range(40) for i in train[k]["input_ids"]} == {ord("a")}
    assert {int(i) for i in val[0]["input_ids"]} == {ord("v")}
    for path, says in [("d", "data.path=.*is empty, validation data left out"),
                       ("short.txt", "data.val_path=.*too short")]:
        with pytest.raises(ValueError, match=says):
            build_data(tiny(tmp_path, *flags, f"--val-path={tmp_path}/{path}"))


LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {"llama3": LLAMA3, "o200k": LLAMA3.replace(r"[\r\n]*|", r"[\r\n/]*|"),
            "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"}
TEXTS = ["The cat's  hat\n\n  sat, didn't it?\r\n\r\nIt'S 12345 67!!\n/path \n\n\n\tx = [1,\n"
         " [2]]  \n",
         "na\u00efve caf\u00e9 \u4f60\u597d\uff0c\u4e16\u754c \U0001f600\U0001f469\u200d\U0001f680 "
         "e\u0301\u3000z\x85q \u00a0w\rr\n",
         "a b<|endoftext|>\nc <|endoftext|> d \n<|endoftext|>e </s>f</s>\ng </s> h [INST] i\n",
         " \n \n\n  x\n"]


def tokenizer_of(folder, kind="gpt2", vocab_size=400, special=("<|endoftext|>",)):
    """A small tokenizer.json, trained here, of the family `kind`."""
    t = pytest.importorskip("tokenizers")
    words = [w for text in TEXTS for w in text.split("\n")] + ["the the cat cat  sat sat"] * 9
    if kind in PATTERNS:
        tokenizer = t.Tokenizer(t.models.BPE())
        byte_level = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = t.pre_tokenizers.Sequence(
            [t.pre_tokenizers.Split(t.Regex(PATTERNS[kind]), "isolated"), byte_level])
        tokenizer.decoder = t.decoders.ByteLevel()
        tokenizer.post_processor = t.processors.ByteLevel(trim_offsets=kind == "gpt2")
        corpus, alphabet = TEXTS * 3 + words, t.pre_tokenizers.ByteLevel.alphabet()
    else:       # no pattern, spaces are letters, the rest in bytes
        tokenizer = t.Tokenizer(t.models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = t.normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = t.pre_tokenizers.Metaspace(prepend_scheme="first")
        special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
        corpus, alphabet = words, []
    tokenizer.train_from_iterator(corpus, t.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet,
        show_progress=False))
    if kind not in PATTERNS:
        tokenizer.decoder = t.decoders.Sequence([
            t.decoders.Replace("\u2581", " "), t.decoders.ByteFallback(), t.decoders.Fuse(),
            t.decoders.Strip(" ", 1, 0)])
        tokenizer.normalizer = tokenizer.pre_tokenizer = None
    if kind == "metaspace":     # as newer Llama 2 files have it
        tokenizer.pre_tokenizer = t.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind == "llama2":
        tokenizer.normalizer = t.normalizers.Sequence(
            [t.normalizers.Prepend("\u2581"), t.normalizers.Replace(" ", "\u2581")])
    tokenizer.enable_truncation(7)      # as some files have it
    tokenizer.enable_padding()
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "o200k", "llama2", "metaspace"])
def test_tokens_of_pieces_are_those_of_the_whole_text(tmp_path, monkeypatch, kind):
    vocabulary = text_of(tokenizer_of(tmp_path / "t", kind))
    tokenizer, eos = vocabulary.tokenizer, vocabulary.eos
    rng, file = random.Random(1), tmp_path / "text.txt"
    pool = [w for text in TEXTS for w in re.findall(r"\S+|\s+", text)]
    pool += ["\n", "\n\n", " ", "word", "\r\n"] * 8
    # ordinary text of long lines, indented code, CRLF, blank lines, and all of it mixed up
    texts = TEXTS + [
        "The cat sat. " * 300, "def f(x):\n    if x:\n\n        return  1\n\n\n" * 60,
        "One line.\r\n\r\n    Another one;\r\n" * 90]
    texts += ["".join(rng.choice(pool) + ("n o" if i % 5 == 0 else "")
                      for i in range(1500)) for _ in range(6)]

    def tokens(text, block):
        monkeypatch.setattr(trainer_module, "BLOCK", block)
        file.write_bytes(text.encode())
        encoded = trainer_module.encode_blocks(
            trainer_module.documents(str(file), "text"), vocabulary)
        return [i for ids, _, _ in encoded for i in ids]
    monkeypatch.setattr(trainer_module, "BATCH", 2000)
    for text in texts:
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        for block in (64, 1000):
            assert tokens(text, block) == whole + [eos] * (whole[-1] != eos), (block, text)
    assert max(whole) < vocabulary.size
    # no good place for a cut: other tokens, but of the same text
    for text in ("\u4f60\u597d" * 300, "\n" * 300 + " " * 300, "a\tb" * 200):
        found = [i for i in tokens(text, 50) if i != eos]
        assert tokenizer.decode(found, skip_special_tokens=False) == text


def test_a_token_file_is_made_once_for_each_source(tmp_path, capsys):
    loaded = text_of(tokenizer_of(tmp_path / "t"))
    docs, made = tmp_path / "docs", tmp_path / "tokens"
    put(docs, {f"{i}.txt": text * 9 for i, text in enumerate(TEXTS)})
    put(docs, {"4.txt": "", "5.txt": "the end<|endoftext|>"})   # it has its separator already
    put(made, {"0123456789abcdef.npy.tmp": "of a process that was killed"})

    def build(*flags):
        config = tiny(tmp_path, f"--data.path={docs}", f"--data.tokenizer={tmp_path}/t", *flags)
        train, _ = build_data(config)
        return config, train, capsys.readouterr().out
    config, train, out = build()
    assert config["model"]["vocab_size"] == train.vocab_size == loaded.size > 256
    (file,) = made.glob("*.npy")
    assert sorted(p.name for p in made.iterdir()) == [f".{file.stem}.json", ".lock", file.name]
    ids, size = np.load(file), sum(p.stat().st_size for p in docs.iterdir())
    assert ids.dtype == np.uint16 and train.bytes_per_token == size / len(ids)
    assert loaded.tokenizer.decode(ids.tolist(), skip_special_tokens=False) == "<|endoftext|>".join(
        p.read_bytes().decode() for p in sorted(docs.iterdir()) if p.stat().st_size)
    before = file.stat().st_mtime_ns
    config, _, out = build("--vocab-size=512")
    assert "from before" in out and file.stat().st_mtime_ns == before
    assert config["model"]["vocab_size"] == 512     # padding is allowed
    put(docs, {"0.txt": "something else entirely\n" * 20})
    assert "from before" not in build()[2] and len(list(made.glob("*.npy"))) == 2
    # what is tokens already stays as it is; then bytes per token are not known
    np.save(docs / "ready.npy", np.full(50, 7))
    _, train, _ = build()
    assert train.source.read(len(train.source) - 50, 50).tolist() == [7] * 50
    assert train.bytes_per_token is None
    assert str(docs / "0.txt") not in build(f"--val-path={docs}/0.txt")[1].source.paths
    # a tokenizer's settings name the token that ends a text; that is another token file
    number = len(list(made.glob("*.npy")))
    put(tmp_path / "t", {"tokenizer_config.json": '{"eos_token": {"content": "the"}}'})
    assert text_of(tmp_path / "t").special == {"eos_token": "the"}
    build()
    assert len(list(made.glob("*.npy"))) == number + 1


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    t = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "one": 70000, "two": 3}
    tokenizer = t.Tokenizer(t.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = t.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    put(tmp_path, {"a.txt": "one two\n" * 500})
    found = opened(tmp_path / "a.txt", f"--data.tokenizer={tmp_path}/words.json")
    assert found.tolist() == [70000, 3] * 500 and found.dtype == np.uint32
    text = text_of(tmp_path / "words.json")
    assert text.size == 70001 and text.decode(text.encode("one two")) == "one two"


def test_a_run_with_a_tokenizer(tmp_path, monkeypatch, capfd):
    tokenizer_of(tmp_path / "t")
    put(tmp_path, {"text.txt": "the cat sat, didn't it?\n" * 4000})
    flags = ["--config=smoke", "--data.tokenizer=t", "--data.path=text.txt", "--device=cpu",
             "--eval-every=4", "--num-workers=1"]
    monkeypatch.chdir(tmp_path)
    assert train.main([*flags, "--max-steps=8", "--sample=the cat"]) is None
    out = capfd.readouterr()
    assert not out.err and " per byte" in out.out and "\nthe cat" in out.out
    line, size = lines_of(tmp_path / "runs/smoke", "eval")[-1], text_of("t").size
    assert 0 < line["val_loss_per_byte"] < line["val_loss"] / 2
    assert train.main([*flags, "--max-steps=12", "--resume", f"--vocab-size={size}"]) is None
    out = capfd.readouterr()
    assert not out.err and "from before" in out.out
    assert lines_of(tmp_path / "runs/smoke", "step")[-1]["step"] == 12
    assert train.main([*flags, "--resume", "--export=out"]) is None
    tokenizer = (tmp_path / "t/tokenizer.json").read_bytes()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer
    # it starts from there with its own tokenizer, and a swarm's nodes find it on the hub
    shape = model_module.pretrained_config({"init_from": "out", "block_size": 64})
    assert shape["data"]["tokenizer"] == "out" and shape["model"]["vocab_size"] == size > 256
    loop = master_script.prepare(["--config=smoke", "--init-from=out", "--data.path=text.txt",
                                  "--hub=./hub", "--eval-every=0"])
    start = load_file("out/model.safetensors")
    assert all(torch.equal(loop.weights[k], v) for k, v in start.items())
    assert (tmp_path / "hub/tokenizer.json").read_bytes() == tokenizer
    monkeypatch.chdir(tmp_path / "hub")
    node = worker_script.prepare(["--node-id=a", f"--hub={tmp_path}/hub", "--max-steps=1",
                                  f"--data.path={tmp_path}/text.txt"])
    assert node.config["data"]["tokenizer"] == f"{tmp_path}/hub"
    assert node.config["model"]["vocab_size"] == size
    node.lock.release()


def limited(size):
    """For preexec_fn: a write past `size` bytes of a file fails, as on a full disk."""
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return limit


def test_a_tokenizer_has_its_refusals(tmp_path, monkeypatch):
    tokenizer_of(tmp_path / "t")
    put(tmp_path, {"text.txt": TEXT, "bad.json": "{}"})
    monkeypatch.chdir(tmp_path)
    flags = ["--config=smoke", "--data.path=text.txt"]
    done = run_script([*flags, "--data.tokenizer=t"], tmp_path, preexec_fn=limited(1000))
    assert done.returncode == 2 and "cannot write runs/tokens" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    assert [p.name for p in (tmp_path / "runs/tokens").iterdir()] == [".lock"]
    # the embedding of a new model grows, that of a model that exists does not
    size = text_of("t").size
    for section, key, value in (("model", "init_from", ""), ("model", "init_from", "somewhere"),
                                ("run", "resume", True)):
        config = tiny(tmp_path, *flags, "--data.tokenizer=t", "--vocab-size=300")
        config[section][key] = value
        says = f"has {size} tokens, but .* embedding holds 300"
        with pytest.raises(ValueError, match=says) if value else contextlib.nullcontext():
            build_data(config)
        config["model"]["vocab_size"] = 512
        build_data(config)
        assert config["model"]["vocab_size"] == 512
    for name, says in [("nowhere.json", "no tokenizer.json there"),
                       ("docs/none", "is no file here, and the Hub"),
                       ("bad.json", "data.tokenizer=bad.json cannot be used"),
                       ("t", "pip install tokenizers")]:
        if name == "t":
            monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises((ValueError, OSError), match=says) as e:
            text_of(name)
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("settings, ids, pad", [
    ({}, {"eos_token_id": 0}, "<|endoftext|>"),
    ({"eos_token": None, "pad_token": None}, {"eos_token_id": 0}, "<|endoftext|>"),
    ({"pad_token": "!", "bos_token": {"content": "!"}, "model_max_length": 9000,
      "padding_side": "right", "more": 1}, {"bos_token_id": 1, "eos_token_id": 0}, "!"),
    (None, {}, "\0")])
def test_what_an_export_needs_of_a_tokenizer(tmp_path, settings, ids, pad):
    special = ["<|other|>"] if settings is None else ["<|endoftext|>"]
    path = tokenizer_of(tmp_path / "t", special=special)
    beside = {} if settings is None else {
        "tokenizer_config.json": json.dumps(settings), "chat_template.jinja": "{{ x }}",
        "special_tokens_map.json": "{}", "added_tokens.json": "{}"}
    put(tmp_path / "t", beside)
    config = tiny(tmp_path, f"--data.tokenizer={tmp_path}/t", "--data.path=/no/such/data")
    files, found = trainer_module.tokenizer_files(config)
    vocabulary = text_of(tmp_path / "t")
    pad_id = vocabulary.tokenizer.token_to_id(pad if pad != "\0" else "\u0100")
    assert found == {**ids, "pad_token_id": pad_id} and vocabulary.eos == ids.get("eos_token_id")
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", *beside}
    written = json.loads(files["tokenizer_config.json"])
    assert written["pad_token"] == pad
    if beside:
        assert files["tokenizer.json"] == path.read_bytes()
        want = {"padding_side": "left", "model_max_length": 16, "more": None, **settings}
        assert all(written.get(k) == want[k] for k in ("padding_side", "model_max_length", "more"))


@pytest.mark.parametrize("special", ["bytes", ["<|endoftext|>"], []])
def test_an_export_answers_a_batch_of_prompts(tmp_path, special):
    """transformers pads them. Each answer is the one to its prompt alone."""
    transformers = pytest.importorskip("transformers", reason="an optional check")
    put(tmp_path, {"a.txt": TEXT})
    flags = [] if special == "bytes" else [
        f"--data.tokenizer={tokenizer_of(tmp_path / 't', special=special)}"]
    config = load_config(["--config=smoke", f"--output-dir={tmp_path}", *flags,
                          f"--data.path={tmp_path}/a.txt"])
    build_data(config)
    torch.manual_seed(0)
    m = build_model(config["model"])
    for p in m.parameters():
        p.data *= 2
    files, ids = trainer_module.tokenizer_files(config)
    model_module.export(m, str(tmp_path / "out"), model_module.exported_files(m, files, ids))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.pad_token_id == ids["pad_token_id"] and tokenizer.padding_side == "left"
    every = "".join(map(chr, range(1, 0x250)))      # no letter of a text is taken for padding
    assert tokenizer.decode(tokenizer(every)["input_ids"]) == every
    assert tokenizer(every)["input_ids"] == trainer_module.Text(config).encode(every)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "out"))
    prompts = ["The quick brown", "The", "over the lazy dog. The"]
    settings = dict(max_new_tokens=6, do_sample=False)
    batched = pipe(prompts, batch_size=2, **settings)
    assert [b[0]["generated_text"] for b in batched] == [
        pipe(prompt, **settings)[0]["generated_text"] for prompt in prompts]

# ---- trainer.py: precision, optimizer, learning rate
# What the hardware lacks becomes fp32.
# Every parameter is in one group, and moves.
# The learning rate follows the curve of its name.


def test_precision_and_device_table(monkeypatch):
    for bf16 in (True, False):
        monkeypatch.setattr(trainer_module, "cpu_has_fast_bf16", lambda: bf16)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
        half = torch.bfloat16 if bf16 else torch.float32
        for kind, wanted, dtype in [
                ("cpu", "auto", torch.float32), ("cpu", "bf16", half),
                ("cpu", "fp16", torch.float32), ("mps", "auto", torch.float32),
                ("mps", "bf16", torch.float32), ("mps", "fp16", torch.float32),
                ("cuda", "auto", torch.bfloat16 if bf16 else torch.float16), ("cuda", "bf16", half),
                ("cuda", "fp16", torch.float16), ("cuda", "fp32", torch.float32)]:
            got, why = trainer_module.pick_precision(wanted, torch.device(kind))
            assert got == dtype and (wanted in why or "as asked" in why), (kind, wanted, bf16)
    assert trainer_module.pick_device("cpu").type == "cpu"
    for name in ("nonsense", "cuda:99"):
        with pytest.raises(ValueError, match="run.device"):
            trainer_module.pick_device(name)


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizer_has_every_tensor_in_one_group_and_moves_it(tmp_path, name, tied):
    t = make_trainer(tiny(tmp_path, f"--optimizer.name={name}", f"--tie-weights={tied}",
                          "--max-steps=3"))
    before = {k: v.clone() for k, v in t.model.named_parameters()}
    groups = [g for o in t.optimizers for g in o.param_groups]
    assert (sorted(id(p) for g in groups for p in g["params"])
            == sorted(id(p) for p in t.model.parameters()))
    assert all((g["weight_decay"] > 0) == (p.dim() >= 2) for g in groups for p in g["params"])
    if name == "muon":
        hidden = {id(p) for p in t.optimizers[0].param_groups[0]["params"]}
        assert hidden == {id(p) for n, p in t.model.named_parameters()
                          if p.dim() == 2 and "layers" in n}
    t.train()
    assert all(not torch.equal(p, before[k]) for k, p in t.model.named_parameters())


def test_learning_rate_curves():
    def lr(step, name):
        return trainer_module.lr_factor(
            step, dict(name=name, warmup_steps=10, max_steps=110, min_lr_ratio=0.1))
    for name, points in [("cosine", {60: 0.55, 110: 0.1, 500: 0.1}), ("constant", {500: 1.0}),
                         ("wsd", {90: 1.0, 100: 0.55, 110: 0.1})]:
        for step, factor in {0: 0.1, 9: 1.0, 10: 1.0, **points}.items():
            assert lr(step, name) == pytest.approx(factor), (name, step)

# ---- trainer.py: the loop
# A run is a function of its config: two are equal, accumulation is one large batch, evaluation
#     changes nothing, N steps are k steps, a resume, and N - k more.
# The loss is that of the next token, whatever a model or a batch does with labels, and it is the
#     mean over all labels that count.
# Whatever people have as data trains; what cannot be trained is refused in one line.
# Whatever ends a run between two updates saves first; what is not finite is never saved.
# A damaged checkpoint is passed over, a folder is one process's, the best is kept.
# fp16 that collapses stops, a run may change its precision, a warmup fits the run.


def trained(tmp_path, *flags, **kwargs):
    """The Trainer of a small run, at its end."""
    t = make_trainer(tiny(tmp_path, *flags), **kwargs)
    t.train()
    return t


def test_it_learns(tmp_path):
    t = trained(tmp_path, "--max-steps=150", "--lr=1e-2", "--logging.every-steps=10")
    assert t.best["val_loss"] < 2.5 < math.log(64)
    assert [line["step"] for line in lines_of(t.folder, "step")] == [1, 2, 5, *range(10, 151, 10)]


def test_accumulation_equals_one_large_batch(tmp_path):
    one, four = (trained(tmp_path, f"--micro-batch-size={micro}", "--max-steps=3",
                         f"--name={micro}") for micro in (16, 4))
    for a, b in zip(lines_of(one.folder, "step"), lines_of(four.folder, "step"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4)
               for a, b in zip(one.model.parameters(), four.model.parameters()))


def same_weights(a, b):
    a, b = a.model.state_dict(), b.model.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_two_runs_are_equal_and_evaluation_does_not_matter(tmp_path):
    a, b, c = (trained(tmp_path, f"--name={name}", "--dropout=0.2", "--max-steps=5",
                       f"--eval-every={every}") for name, every in [("a", 0), ("b", 0), ("c", 1)])
    assert same_weights(a, b) and same_weights(a, c)

# models of many makes


class Bigram(nn.Module):
    """The least language model; `kind` says what its forward does with labels and returns."""

    def __init__(self, kind="aligned"):
        super().__init__()
        self.kind, self.embed, self.out = kind, nn.Embedding(64, 32), nn.Linear(32, 64)
        if kind == "zero head":
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def logits(self, ids):
        return self.out(self.embed(ids))

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids)
        if labels is None or self.kind.startswith("logits"):
            return {"logits dict": {"logits": logits},
                    "logits tuple": (logits, None)}.get(self.kind, logits)
        if self.kind == "shifts":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"dict": {"loss": loss}, "tuple": (loss, logits)}.get(self.kind, loss)


class NanoGPT(Bigram):
    def forward(self, idx, targets=None):
        logits = self.logits(idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class PadIsZero(Bigram):
    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, x, y):
        return self.loss(self.logits(x).flatten(0, 1), y.flatten())


def hf_llama():
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=26, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = hf_llama()

    def forward(self, **kwargs):
        return self.inner(**kwargs)


MODELS = {"ours": lambda: build_model({"name": "gpt", "vocab_size": 26, "n_layer": 1, "n_head": 2,
                                       "d_model": 32}),
          "nanogpt": NanoGPT, "pad is zero": PadIsZero, "transformers": hf_llama,
          "wrapped": Wrapped,
          **{kind: functools.partial(Bigram, kind) for kind in
             ("aligned", "shifts", "zero head", "dict", "tuple", "logits", "logits dict",
              "logits tuple")}}


def rows(count=32, length=12):
    """Sequences that a bigram model can learn, of tokens 1 to 25."""
    start = torch.arange(count)[:, None] % 24 + 1
    return (start * torch.tensor([3 ** i % 25 for i in range(length)]) + 5) % 25 + 1


def next_token_loss(model, ids):
    with torch.no_grad():
        output = (model.logits(ids) if isinstance(model, Bigram)
                  else (model.inner if isinstance(model, Wrapped) else model)(input_ids=ids))
    logits = output if isinstance(output, torch.Tensor) else output["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def short_config(tmp_path, **sections):
    """As somebody writes it who copied trainer.py: what is left out is in the file."""
    config = {"run": {"output_dir": str(tmp_path), "max_steps": 10, "device": "cpu"},
              "optimizer": {"lr": 1e-2}, "scheduler": {"warmup_steps": 2},
              "data": {"micro_batch_size": 8, "target_batch_size": 8},
              "logging": {"every_steps": 1}}
    for section, values in sections.items():
        config[section] = {**config.get(section, {}), **values}
    return config


def mean_of(model, data, micro=4):
    config = {"data": {"micro_batch_size": micro}, "run": {"eval_batches": 99}}
    return trainer_module.mean_loss(model, data, config, torch.device("cpu"))


@pytest.mark.parametrize("kind", MODELS)
def test_labels_as_transformers_has_them_are_shifted(tmp_path, kind):
    ids = rows()
    data = [{"input_ids": row, "labels": row.clone()} for row in ids]   # as its collator makes them
    torch.manual_seed(0)
    model = MODELS[kind]()
    before = next_token_loss(model, ids)
    t = Trainer(model, short_config(tmp_path),
                torch.utils.data.DataLoader(data, batch_size=32), data)
    assert mean_of(model, data) == pytest.approx(before, rel=1e-4)
    t.train()
    losses = [line["loss"] for line in lines_of(t.folder, "step")]
    assert losses[0] == pytest.approx(before, rel=1e-4) and losses[-1] < before - 0.1
    assert t.best["val_loss"] == pytest.approx(next_token_loss(model, ids), rel=1e-4)
    assert t.tokens == 10 * 32 * 11 and t.position == 10 * 32
    # and labels that are shifted already give the same loss
    shifted = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    if kind in ("shifts", "transformers", "wrapped"):      # these never see the last label of a row
        ids = ids[:, :-1]
    assert mean_of(model, shifted) == pytest.approx(next_token_loss(model, ids), rel=1e-4)


def test_labels_of_a_batch():
    memory, x = set(), torch.tensor([[1, 2, 2, 3]])
    only = torch.tensor([[-100, 2, -100, -100]])            # shifted: the token after 2 is 2

    def labels(*batch, **named):
        return trainer_module.as_batch(named or batch, memory)["labels"].tolist()
    assert labels(x, only) == [[2, -100, -100, -100]]
    labels(x, torch.tensor([[2, 2, 3, 4]]))                 # this source shifts
    assert labels(x, only) == only.tolist()
    assert labels(x) == [[2, 2, 3, -100]]
    memory.clear()
    assert labels(input_ids=torch.tensor([[0, 0, 5, 6]]), labels=torch.tensor(
        [[-100, -100, 5, 6]]), attention_mask=torch.tensor([[0, 0, 1, 1]])) == [
            [-100, -100, 6, -100]]
    assert labels(input_ids=x, attention_mask=torch.tensor([[1, 1, 1, 0]])) == [[2, 2, -100, -100]]


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind[:5] not in ("dict", "tuple")])
def test_a_mean_is_over_labels(tmp_path, kind):
    ids, labels = rows(8, 15)[:, :-1], rows(8, 15)[:, 1:].clone()
    labels[::2, 3:] = {"nanogpt": -1, "pad is zero": 0}.get(kind, -100)
    data, results = list(zip(ids, labels)), []
    for micro in (8, 1):
        torch.manual_seed(1)
        model, gradients = MODELS[kind](), {}
        t = Trainer(model, short_config(
            tmp_path, run={"max_steps": 1, "name": str(micro)}, optimizer={"grad_clip": 0.0},
            data={"micro_batch_size": micro}), data)
        for name, p in model.named_parameters():
            p.register_hook(lambda g, k=name: gradients.update({k: gradients.get(k, 0) + g}))
        val_loss = mean_of(model, data, micro)
        t.train()
        results.append((gradients, lines_of(t.folder, "step")[0]["loss"], val_loss))
    whole, parts = results
    assert parts[1:] == pytest.approx(whole[1:], rel=1e-5)
    for name, g in parts[0].items():
        assert (g - whole[0][name]).norm() <= 1e-4 * whole[0][name].norm() + 1e-8
    last = 4 if kind in ("shifts", "transformers", "wrapped") else 0
    assert t.tokens == (labels > 0).sum() - last


def test_batches_as_people_have_them(tmp_path):
    ids = rows()
    lists = [{"input_ids": row.tolist(), "text": "not numbers"} for row in ids]
    ragged = [{"input_ids": row.tolist()[:5 + i % 7]} for i, row in enumerate(ids)]
    loader = functools.partial(torch.utils.data.DataLoader, batch_size=8)
    sources = {"lists": lists, "loader of lists": loader(lists), "ragged": ragged,
               "ids": [row.tolist() for row in ids], "tensors": list(ids),
               **{str(dtype): loader([(row[:-1].to(dtype), row[1:].to(dtype)) for row in ids])
                  for dtype in (torch.uint8, torch.int16, torch.uint16, torch.int32)}}
    for name, data in sources.items():
        model = Bigram()
        t = Trainer(model, short_config(tmp_path, run={"name": name}), data, data)
        before = next_token_loss(model, ids)
        t.train()
        assert next_token_loss(model, ids) < before - 0.1 and t.position == 10 * 8, name
    batch = trainer_module.collate(ragged[:2])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]


class Stateless(Bigram):
    def forward(self, tokens, cache=None):
        assert cache is None, "labels are for a second argument that wants them"
        return {"states": self.embed(tokens)}


class Hidden(Bigram):
    """Its ignored label is found neither in an attribute nor in its source."""
    def forward(self, idx, targets):
        number = {"ignore_" + "index": -1}
        return F.cross_entropy(self.logits(idx).flatten(0, 1), targets.flatten(), **number)


@pytest.mark.parametrize("data, says", [
    ([{"text": "abc"}] * 8, "the data has text, and no input_ids"),
    ([{"input_ids": [1.5]}] * 8, "float"), ({"train": [[1, 2]]}, "a dict of train"),
    ([{"input_ids": [1, 2], "labels": [1]}] * 8, "each position wants one label"),
    ([{"input_ids": [1, 2], "labels": [-100] * 2}] * 8, "no label that counts"),
    ([], "empty"), (torch.utils.data.DataLoader([]), "no batch"),
    ([[1, 2]] * 8, "neither a loss nor logits"),
    ([[1, 2]] * 8, "give the model an attribute ignore_index")])
def test_what_cannot_be_trained_is_one_line(tmp_path, data, says):
    model = Stateless() if "logits" in says else Hidden() if "attribute" in says else Bigram()
    with pytest.raises(TrainingError, match=says) as e:
        Trainer(model, short_config(tmp_path), data).train()
    assert "\n" not in str(e.value)
    if "attribute" in says:
        model.ignore_index = -1
        Trainer(model, short_config(tmp_path, run={"name": "b"}), data).train()


def test_the_head_lines_say_what_is_there(tmp_path, capsys):
    data = torch.utils.data.DataLoader([(row[:-1], row[1:]) for row in rows(32, 17)], batch_size=16)
    Trainer(nn.Sequential(nn.Embedding(26, 8), nn.Linear(8, 26)), short_config(
        tmp_path, run={"max_steps": 2}, data={"micro_batch_size": 4}), data).train()
    out = capsys.readouterr().out
    assert "model    Sequential | 442 parameters | to step 2\n" in out
    assert ("batch    2 x 16 x 16 = 512 tokens per step (microbatches x samples x positions)\n"
            in out)

# what a run tells, and whom


class Coordinator:
    """One that does nothing; a test overrides what it needs."""

    def start(self, trainer):
        pass
    after_step = finish = start

    def state_dict(self):
        return {}


def test_hooks_and_metrics_agree(tmp_path):
    seen = []
    t = trained(tmp_path, "--max-steps=4", "--checkpoint.every-steps=2",
                hooks=[lambda e, p: seen.append({"event": e, **p})])
    assert seen == [json.loads(line)
                    for line in (t.folder / "metrics.jsonl").read_text().splitlines()]
    assert ([s["event"] for s in seen]
            == ["step"] * 2 + ["checkpoint"] + ["step"] * 2 + ["eval", "checkpoint"])
    assert set(seen[0]) == {"event", "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s",
                            "seconds"}


def test_coordinator_is_called_and_saved(tmp_path):
    calls = []

    class Records(Coordinator):
        def start(self, trainer):
            calls.append(("start", trainer.step))

        def lr_scale(self, step):
            return 0.5

        def schedule_step(self, step):
            return 10 + step        # the end of the warmup

        def after_step(self, trainer):
            calls.append(("step", trainer.step))

        def finish(self, trainer):
            calls.append(("finish", trainer.step))

        def state_dict(self):
            return {"calls": len(calls)}

        def load_state_dict(self, state):
            calls.append(("load", state["calls"]))
    for flags in (["--max-steps=2"], ["--max-steps=3", "--resume"]):
        t = trained(tmp_path, "--scheduler.max-steps=99", "--scheduler.name=constant", *flags,
                    coordinator=Records())
    assert calls == [("start", 0), ("step", 1), ("step", 2), ("finish", 2),
                     ("load", 4), ("start", 2), ("step", 3), ("finish", 3)]
    rates = {line["lr"] for line in lines_of(t.folder, "step")}
    assert rates == {0.5 * t.config["optimizer"]["lr"]}


def test_broken_compile_falls_back(tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler\nmore")
    with monkeypatch.context() as m:
        m.setattr(torch, "compile", lambda model: fail)
        t = trained(tmp_path, "--compile", "--max-steps=2", "--name=c")
    assert ("torch.compile failed, going on without it: RuntimeError: no compiler"
            in capsys.readouterr().out)
    assert same_weights(t, trained(tmp_path, "--max-steps=2", "--name=e"))

# checkpoints


def saved_by(t):
    return [p.name for p in t.checkpoints()]


def test_the_best_is_kept_and_old_checkpoints_go(tmp_path):
    t = make_trainer(tiny(tmp_path, "--max-steps=6", "--checkpoint.every-steps=1", "--keep-last=2",
                          "--eval-every=1"))
    t.evaluate = iter([3.0, 1.0, 2.0, 2.5, 4.0, 5.0]).__next__
    t.train()
    assert ([p.name for p in sorted(t.folder.glob("*.pt"))]
            == ["best.pt", "step_000000000005.pt", "step_000000000006.pt"])
    best = torch.load(t.folder / "best.pt", weights_only=True)
    assert best["step"] == 2 and best["val_loss"] == 1.0
    assert (json.loads((t.folder / "latest.json").read_text())
            == {"step": 6, "path": "step_000000000006.pt"})


def test_resume_passes_over_damaged_checkpoints_and_keeps_the_good(tmp_path, capsys):
    flags = ["--checkpoint.every-steps=2", "--keep-last=3"]
    done = trained(tmp_path, *flags, "--max-steps=6")
    newest, second, _ = done.checkpoints()
    newest.write_bytes(newest.read_bytes()[:-1000])
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 1
    second.write_bytes(content)
    put(done.folder, {"step_9_mine.pt": "a copy of the user's"})
    t = make_trainer(tiny(tmp_path, *flags, "--keep-last=2", "--max-steps=6", "--resume"))
    out = capsys.readouterr().out
    assert t.step == 2 and out.count("is damaged") == 2 and "step_000000000006" in out
    t.train()
    assert same_weights(t, done)
    assert saved_by(t) == ["step_000000000006.pt", "step_000000000004.pt"]
    for name in ("step_000000000006.pt.damaged", "step_9_mine.pt"):
        assert (t.folder / name).exists()
    put(t.folder, dict.fromkeys(saved_by(t), "nonsense"))
    with pytest.raises(FileNotFoundError, match="no usable checkpoint"):
        make_trainer(tiny(tmp_path, *flags, "--resume"))


def test_resume_takes_new_settings_and_says_so(tmp_path, capsys):
    trained(tmp_path, "--max-steps=2")
    t = make_trainer(tiny(tmp_path, "--max-steps=4", "--resume", "--lr=0.5", "--weight-decay=0.3"))
    out = capsys.readouterr().out
    assert ("at step 2 | now run.max_steps=4 (was 2), optimizer.lr=0.5 (was 0.001), "
            "optimizer.weight_decay=0.3 (was 0.1)\n") in out, out
    assert t.optimizers[0].param_groups[0]["weight_decay"] == 0.3 and t.step == 2
    t.train()
    assert [line["step"] for line in lines_of(t.folder, "step")] == [1, 2, 3, 4]


def test_resume_from_the_best_checkpoint_is_the_run_from_there(tmp_path, capsys):
    flags = ["--checkpoint.every-steps=2", "--eval-every=3", "--keep-last=9", "--max-steps=8"]
    whole = make_trainer(tiny(tmp_path, *flags))
    whole.evaluate = iter([1.0, 2.0, 3.0]).__next__
    whole.train()
    t = make_trainer(tiny(tmp_path, *flags, "--resume", "--best"))
    assert t.step == 3 and "step_000000000008.pt is set aside" in capsys.readouterr().out
    t.train()
    assert t.step == 8 and same_weights(t, whole)
    assert (t.folder / "step_000000000008.pt.left").exists()


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        tokens = (torch.arange(17) * (i + 1) + torch.randint(0, 64, (1,))) % 64
        return {"input_ids": tokens[:-1], "labels": tokens[1:], "note": "not a tensor"}


@pytest.mark.parametrize("kind", ["dataset", "workers", "loader", "shuffling loader"])
def test_resume_is_exact_with_data_of_the_users(tmp_path, kind):
    def data():
        return Augmented() if "loader" not in kind else torch.utils.data.DataLoader(
            Augmented(), batch_size=8, shuffle="shuffling" in kind)
    flags = ["--dropout=0.2", f"--num-workers={2 if kind == 'workers' else 0}",
             "--scheduler.max-steps=20"]
    whole, _, parts = (
        trained(tmp_path, *flags, *more, data=(data(), data()))
        for more in (["--name=whole", "--max-steps=6", "--eval-every=0"],
                     ["--name=parts", "--max-steps=3", "--eval-every=1"],
                     ["--name=parts", "--max-steps=6", "--eval-every=1", "--resume"]))
    assert same_weights(whole, parts)


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    for resume in ("false", "true"):
        t = make_trainer(tiny(tmp_path, "--max-steps=2", f"--resume={resume}"))
        for again in ("false", "true"):
            with pytest.raises(ValueError, match="another process is training in this folder"):
                make_trainer(tiny(tmp_path, f"--resume={again}"))
        t.train()
    with pytest.raises(ValueError, match="already holds a run"):
        make_trainer(tiny(tmp_path))
    trained(tmp_path, "--max-steps=3", "--resume")

# trouble


MEMORY = "--micro-batch-size.*--gradient-checkpointing"


@pytest.mark.parametrize("where", ["swarm", "hook", "model"])
@pytest.mark.parametrize("error, raised, says", [
    (OSError(28, "No space left on device"), TrainingError, "No space left on device"),
    (KeyError("a bug"), KeyError, "a bug"), (RuntimeError("no such hub"), RuntimeError, "no such"),
    (torch.OutOfMemoryError("CUDA out of memory. Tried"), TrainingError, MEMORY),
    (MemoryError(), TrainingError, MEMORY),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                  "allocate 9 bytes"), TrainingError, MEMORY)])
def test_what_fails_between_updates_saves_first(tmp_path, where, error, raised, says):
    def fail(first, *_):
        if t.step == 3 and t.model.training and first != "checkpoint":
            raise error
    coordinator = Coordinator()
    t = make_trainer(tiny(tmp_path), coordinator=coordinator)
    if where == "swarm":
        coordinator.after_step = fail
    elif where == "hook":
        t.hooks.append(fail)
    else:
        t.model.register_forward_pre_hook(fail)
    with pytest.raises(raised, match=says) as e:
        t.train()
    assert "\n" not in str(e.value) and saved_by(t) == ["step_000000000003.pt"]


def test_trouble_with_the_validation_data_saves_the_work(tmp_path):
    np.arange(2000, dtype="<u2").tofile(tmp_path / "big.bin")
    t = make_trainer(tiny(tmp_path, f"--val-path={tmp_path}/big.bin", "--eval-every=3"))
    with pytest.raises(TrainingError, match="^token .* is outside model.vocab_size=64$"):
        t.train()
    assert saved_by(t) == ["step_000000000003.pt"]


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(tmp_path):
    t = make_trainer(tiny(tmp_path, "--checkpoint.every-steps=2"), Bigram())
    t.model.register_forward_hook(
        lambda module, inputs, loss: loss * math.nan if t.step == 3 and module.training else loss)
    with pytest.raises(TrainingError, match="not finite near step 4.*step_000000000002.pt"):
        t.train()
    assert saved_by(t) == ["step_000000000002.pt"]
    assert all(v.isfinite().all() for v in read_checkpoint(t.checkpoints()[0])["model"].values())
    assert all(p.isfinite().all() for p in t.model.parameters())


@pytest.mark.parametrize("scaler, says", [
    ({}, "fp16 has skipped .* updates in a row, its loss scale"),       # it falls
    ({"init_scale": 2.0 ** 14, "backoff_factor": 0.999}, "fp16 has skipped 100 updates")])
def test_fp16_that_collapses_stops_with_its_state(tmp_path, monkeypatch, scaler, says):
    monkeypatch.setattr(trainer_module, "pick_precision", lambda *_: (torch.float16, "for a test"))
    t = make_trainer(tiny(tmp_path, "--max-steps=500"), Bigram())
    t.scaler = torch.amp.GradScaler("cpu", **scaler)
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    for p in t.model.parameters():
        p.register_hook(lambda g: g * math.nan)
    with pytest.raises(TrainingError, match=says):
        t.train()
    saved = read_checkpoint(t.checkpoints()[0])
    assert 16 <= saved["step"] == t.step <= trainer_module.SKIPPED
    assert all(torch.equal(saved["model"][k], v) for k, v in before.items())


@pytest.mark.parametrize("first, second", [("float32", "float16"), ("float16", "float32"),
                                           ("float16", "float16")])
def test_a_run_may_change_its_precision(tmp_path, monkeypatch, first, second):
    for dtype, flags in ((first, ["--max-steps=3"]), (second, ["--max-steps=6", "--resume"])):
        monkeypatch.setattr(trainer_module, "pick_precision",
                            lambda wanted, device: (getattr(torch, dtype), ""))
        t = trained(tmp_path, *flags)
        assert t.scaler.is_enabled() == (dtype == "float16")
    assert t.step == 6 and math.isfinite(t.best["val_loss"])


def test_a_warmup_longer_than_the_run_is_cut(tmp_path, capsys):
    t = trained(tmp_path, "--max-steps=50", "--warmup-steps=100")
    assert "scheduler.warmup_steps=100 is as long as the run: 5 instead" in capsys.readouterr().out
    assert max(line["lr"] for line in lines_of(t.folder, "step")) == t.config["optimizer"]["lr"]
    make_trainer(tiny(tmp_path, "--max-steps=5", "--warmup-steps=10", "--name=part",
                      "--scheduler.max-steps=50"))
    assert "instead" not in capsys.readouterr().out, "part of a longer curve"


def test_a_sample_ends_with_the_text(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 9)

        def forward(self, ids):
            return F.one_hot((ids + 1) % 9, 9).float() * 99
    config = tiny(tmp_path, "--temperature=0", "--block-size=4")
    assert trainer_module.generate(Counts(), [1], config, 20, stop=7) == [1, 2, 3, 4, 5, 6, 7]
    assert len(trainer_module.generate(Counts(), [1], config, 20)) == 21


def test_half_precision_model_and_negative_labels():
    m = build_model(SHAPE).bfloat16()
    ids = torch.randint(0, 97, (2, 30))
    m(ids, labels=ids)["loss"].backward()
    labels = ids.clone()
    labels[:, ::2] = -1
    other = labels.masked_fill(labels < 0, -100)
    assert (m(ids, labels=labels)["loss"] == m(ids, labels=other)["loss"]
            != m(ids, labels=ids)["loss"])

# ---- trainer.py: watching
# A picture of any curves is sound. Plotting only reads. TensorBoard gets each number once.
# Whatever is printed goes above the bar; a pipe gets plain lines.


def decay(steps, end=2.0):
    """Curves of a run that starts at a loss of 12."""
    train = [(s, end + 10 * math.exp(-s / 9) + 0.1 * math.sin(s)) for s in range(1, steps + 1)]
    return {"train": train, "val": train[9::10], "lr": [(s, 1e-3 / s) for s, _ in train]}


@pytest.mark.parametrize("runs", [
    {}, {"empty": {}}, {"one": {"train": [(5, 3.2)], "val": [(5, 3.2)], "lr": [(5, 1e-4)]}},
    {"val only": {"val": [(50, 3.0), (100, 2.0)]}}, {"flat": {"train": [(1, 2.0), (2, 2.0)]}},
    {"holes": {"train": [(1, None), (2, math.nan), (3, math.inf), (4, 3.0), (None, 1.0)],
               "lr": [(4, 0.0)], "val": None}},
    {"wild": {"train": [(i, (-1e9) ** (i % 5)) for i in range(1000)]}},
    {"<b>&\"'\x00\x1b $x$ " + "long" * 50: decay(30)}, {"long": decay(100_000)},
    {f"run {i}": decay(30 * (i % 3 + 1), 2 + i / 1000) for i in range(16)},
], ids=lambda runs: next(iter(runs), "nothing")[:5])
def test_every_picture_is_sound(runs):
    pytest.importorskip("matplotlib")
    text = draw(runs)
    assert ElementTree.fromstring(text).tag.endswith("svg") and len(text) < 2_000_000
    for name in runs:
        shown = "".join(c for c in name if c.isprintable())[:20]
        assert f"{shown} -->" in html.unescape(text).replace("\\$", "$")


def test_plot_reads_runs_and_nodes_and_touches_nothing(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    line = '{"event": "%s", "step": %d, "%s": %s, "lr": 1e-3}\n'
    step, val = line % ("step", 1, "loss", 3), line % ("eval", 2, "val_loss", 2.5)
    put(tmp_path, {f"{name}/metrics.jsonl": text.encode("latin-1") for name, text in {
        "a": step + val + '{"event": "st', "b": "\xff[1]\n{}\nnull\n" + val, "swarm/n1": step,
        "swarm/n2": step.replace("3", "null") + step, "new": ""}.items()})
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    def drawn(*flags):
        path = plot(tiny(tmp_path, "--plot", *flags))
        text = path.read_text(encoding="utf-8")
        path.unlink()
        assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
        names = re.findall(r"<!-- \d[\d.]* (\S+) -->", text)
        return path.relative_to(tmp_path).as_posix(), names
    assert drawn("--name=a") == ("a/loss.svg", ["a"])
    assert drawn("--name=a, b") == ("loss.svg", ["a", "b"])
    assert drawn("--name=swarm") == ("swarm/loss.svg", ["swarm/n1", "swarm/n2"])
    assert drawn("--name=swarm", "--node-id=n2") == ("swarm/n2/loss.svg", ["swarm/n2"])
    assert drawn("--name=a,swarm") == ("loss.svg", ["a", "swarm/n1", "swarm/n2"])
    for flags in (["--name=c"], ["--name=a,c"], ["--name=a", "--node-id=n1"]):
        with pytest.raises(FileNotFoundError, match="there are: a, b, new, swarm/n1, swarm/n2$"):
            drawn(*flags)
    with pytest.raises(ValueError, match="no loss to draw yet"):
        drawn("--name=new")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        drawn("--name=a")


def test_tensorboard_gets_each_number_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        make_trainer(tiny(tmp_path, "--tensorboard"))
    assert not list(tmp_path.iterdir())
    writers = []

    class SummaryWriter:
        def __init__(self, folder, purge_step, flush_secs):
            self.folder, self.purge_step, self.scalars, self.open = folder, purge_step, {}, True
            writers.append(self)

        def add_scalar(self, name, value, step):
            assert self.open and (name, step) not in self.scalars
            self.scalars[name, step] = value

        def close(self):
            self.open = False
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard",
                        types.SimpleNamespace(SummaryWriter=SummaryWriter))
    trained(tmp_path, "--tensorboard", "--max-steps=2")
    t = trained(tmp_path, "--tensorboard", "--max-steps=3", "--resume")
    first, second = writers
    assert first.folder == t.folder / "tensorboard" and not first.open and not second.open
    assert (first.purge_step, second.purge_step) == (1, 3)
    assert set(second.scalars) == {(name, 3) for name in (
        "loss", "lr", "grad_norm", "tokens_per_s", "val_loss")}
    found = {**first.scalars, **second.scalars}
    assert [found["loss", s] for s in (1, 2, 3)] == [
        line["loss"] for line in lines_of(t.folder, "step")]


def on_screen(text):
    """The lines a terminal ends up with."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        cells = []
        for part in line.split("\r"):
            if part.startswith("\x1b[K"):       # clears the line first
                cells, part = [], part[3:]
            cells[:len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_whatever_is_printed_goes_above_the_bar(tmp_path, monkeypatch):
    class Talks(Coordinator):
        def start(self, trainer):
            print("waiting  for a global model")

        def after_step(self, trainer):
            print("hub_error", "two", "writes", flush=True)
            print("a warning", file=sys.stderr)
            print("notice   half a line", end="")
            print(" and its end")
            trainer.emit("push", f"{trainer.progress()} | 1 steps", step=trainer.step)
            if trainer.step == 2:
                trainer.step += 3       # a swarm that has moved on
            if trainer.step == 7:
                raise KeyError("a bug")

        def finish(self, trainer):
            print("finish")
    monkeypatch.delenv("TERM", raising=False)
    for steps, flags in ((6, []), (9, ["--name=bug"])):
        terminal, errors = Terminal(), Terminal()
        errors.write = terminal.write       # two streams, one screen
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", errors)
        t = make_trainer(tiny(tmp_path, f"--max-steps={steps}", "--eval-every=2", *flags),
                         coordinator=Talks())
        with pytest.raises(KeyError) if flags else contextlib.nullcontext():
            t.train()
        assert sys.stdout is terminal and sys.stderr is errors      # given back
        lines = on_screen(terminal.getvalue())
        assert {line.split()[0] for line in lines if line} <= {
            "data", "device", "model", "folder", "batch", "waiting", "hub_error", "a", "notice",
            "push", "eval", "checkpoint", "step", "finish"}, lines
        updates = 3 if not flags else 4
        for line in ("notice   half a line and its end", "hub_error two writes", "a warning"):
            assert lines.count(line) == updates
        drawn, = [line for line in lines if line.startswith("step")]
        assert f" 6/{steps} |" in drawn
        assert re.search(r"\| loss \d\.\d{4} \| [\d,]+ tok/s \| eta \d+s$", drawn)
        assert lines[-1] == ""              # the last line is a whole one, after an error too
    assert len(lines_of(t.folder, "step")) == 3     # 1, 2 that became 5, 6
    for without in ("tqdm", "TERM"):
        with monkeypatch.context() as m:
            if without == "tqdm":
                m.setitem(sys.modules, "tqdm", None)
            else:
                m.setenv("TERM", "dumb")
            m.setattr(sys, "stdout", plain := Terminal())
            trained(tmp_path, "--max-steps=2", f"--name={without}")
        assert plain.getvalue().count("\nstep ") == 2 and "\r" not in plain.getvalue()


def in_terminal(args, cwd, press):
    """(lines on the screen, exit status) of train.py in a terminal of 90 columns; Ctrl-C is pressed
    when the text `press` has appeared."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
    p = subprocess.Popen([sys.executable, HERE / "train.py", *args], cwd=cwd, stdin=theirs,
                         stdout=theirs, stderr=theirs, start_new_session=True,
                         preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                         env={**os.environ, "TERM": "xterm"})
    PROCESSES.append(p)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):      # EIO: the other side is closed
        while part := os.read(ours, 65536):
            text += part
            if press and press in text.decode(errors="ignore"):
                os.write(ours, b"\x03")
                press = None
    os.close(ours)
    return on_screen(text.decode().replace("^C", "")), p.wait(timeout=PATIENCE)


def test_a_bar_in_a_terminal_and_plain_lines_in_a_pipe(tmp_path):
    args = ["--config=smoke", "--name=t", "--data.path=synthetic", "--checkpoint.every-steps=5"]
    piped = run_script([*args, "--max-steps=10", "--eval-every=5"], tmp_path)
    assert [line.split()[0] for line in piped.stdout.splitlines()] == [
        "data", "notice", "device", "model", "folder", "batch", "step", "step", "step", "eval",
        "checkpoint", "step", "eval", "checkpoint"]
    assert "\r" not in piped.stdout and not piped.stderr
    lines, status = in_terminal([*args, "--max-steps=100000", "--resume", "--eval-every=50"],
                                tmp_path, "step     4")
    lines = [line for line in lines if line and not line.startswith("notice")]
    events = [line.split()[0] for line in lines]
    assert status == 0 and events[:4] == ["data", "resume", "device", "model"], lines
    assert events[-3:] == ["step", "checkpoint", "stop"] and events.count("step") == 1, lines
    assert set(events[4:-3]) == {"folder", "batch", "checkpoint", "stop"}
    assert "finishing this step, then saving; again to stop now" in lines[-4 - lines[-4].startswith(
        "checkpoint")], lines
    assert all(len(line) <= 90 for line in lines if line.startswith(("step", "eval")))
    n = int(lines[-1].split()[-1])
    assert lines[-3].startswith(f"step     {n}/100000 |") and "eta" in lines[-3]
    steps = [line["step"] for line in lines_of(tmp_path / "runs/t", "step")]
    assert steps == [1, 2, 5, 10, 11, 12, 15, *range(20, n + 1, 10)]

# ---- train.py, as processes
# A run remembers its settings. Killed at any moment and resumed, it is the run.
# A signal, a dead data process, a full disk and an output that is gone lose nothing.
# A refusal is one line with status 2, and touches nothing.
# The README's commands work, and each leaf works alone.


def train_main(capfd, *args):
    """(what train.py ends with, what it prints), without a process."""
    said = train.main(list(args))
    return said, capfd.readouterr().out


def test_a_run_remembers_its_settings(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run = functools.partial(train_main, capfd)
    first = ["--config=smoke", "--name=two", "--max-steps=6", "--lr=0.003", "--data.path=synthetic",
             "--n-layer=1", "--d-model=32", "--device=cpu", "--eval-batches=1"]
    assert run(*first)[0] is None
    said, out = run("--name=two", "--resume", "--max-steps=9")
    assert said is None and " at step 6 | now run.max_steps=9 (was 6)\n" in out, out
    assert "notice" not in out and re.search("step +9/9", out)
    steps = lines_of(tmp_path / "runs/two", "step")
    # the curve stretches with the run: nothing else is known of a longer one
    c = dict(name="cosine", warmup_steps=0, max_steps=9, min_lr_ratio=0.1)
    assert steps[-1]["lr"] == pytest.approx(0.003 * trainer_module.lr_factor(8, c))
    assert run("--name=two", "--resume")[1].count("done     already at step 9 of 9") == 1
    assert "begun with --config=smoke" in run("--config=gpt2", "--name=two", "--resume")[0]
    said, out = run("--name=two", "--sample=x", "--tokens=3", "--export=out", "--best")
    assert said is None and "best.pt, at step" in out and "export   out" in out
    assert run("--name=two", "--best")[0] == ("error: --best wants --resume, --sample or --export "
                                              "with it")
    # a run that was begun from somebody's weights needs them no more
    assert run("--init-from=out", "--name=ft", "--max-steps=4", "--data.path=synthetic",
               "--block-size=32", "--eval-batches=1", "--target-batch-size=16")[0] is None
    (tmp_path / "out").rename(tmp_path / "gone")
    said, out = run("--name=ft", "--resume", "--max-steps=5", "--tokenizer=")
    assert said is None and "at step 4 | now run.max_steps=5" in out, (said, out)
    # and what fails leaves nothing behind
    assert "no usable checkpoint" in run("--name=nobody", "--resume")[0]
    assert not (tmp_path / "runs/nobody").exists()


SILENT = ["--config=smoke", "--data.path=synthetic", "--eval-every=0", "--device=cpu",
          "--d-model=32", "--checkpoint.every-steps=100000", "--name=s"]
ENDLESS = "--max-steps=1000000"


def last_step(folder):
    try:
        return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, ValueError, KeyError, IndexError):
        return -1


def begun(tmp_path, args, until=lambda folder: last_step(folder) >= 5, **kwargs):
    """train.py as a process, once until(its folder) holds, or after its end."""
    def hang_up_counts():       # these tests may run under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    kwargs = {"preexec_fn": hang_up_counts, "stdout": subprocess.PIPE, **kwargs}
    p = subprocess.Popen([sys.executable, HERE / "train.py", *SILENT, *args], cwd=tmp_path,
                         stderr=subprocess.PIPE, text=True, **kwargs)
    PROCESSES.append(p)
    while not until(tmp_path / "runs/s") and p.poll() is None:
        time.sleep(0.002)
    return p


def saved_at_its_end(tmp_path):
    """Whether the last thing that a run did was to save its last step."""
    last = json.loads((tmp_path / "runs/s/metrics.jsonl").read_text().splitlines()[-1])
    return last["event"] == "checkpoint" and (tmp_path / "runs/s" / last["path"]).exists()


def test_a_data_process_that_dies_loses_nothing(tmp_path):
    p = begun(tmp_path, [ENDLESS, "--num-workers=1"])
    for child in Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    out, err = p.communicate(timeout=PATIENCE)
    assert p.returncode == 2 and "a data process has died" in err and err.count("\n") == 1, err
    assert saved_at_its_end(tmp_path)


@pytest.mark.parametrize("shell", ["| head -2", "> /dev/full", ">&- 2>&-", "| iconv -f cp1252"])
def test_output_that_goes_or_cannot_show_a_letter_is_no_end(tmp_path, shell):
    sample = " --sample=\u65e5\u672c --tokens=20"
    command = f"{sys.executable} {HERE}/train.py {' '.join(SILENT)} --max-steps=20{sample}"
    done = subprocess.run(["/bin/bash", "-c", f"{command} {shell}; exit ${{PIPESTATUS[0]}}"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert saved_at_its_end(tmp_path)


def test_a_closed_terminal_saves_and_nohup_goes_on(tmp_path):
    p = begun(tmp_path, [ENDLESS])
    p.stdout.close()
    p.send_signal(signal.SIGHUP)
    assert p.wait(timeout=PATIENCE) == 0 and saved_at_its_end(tmp_path)
    (tmp_path / "runs/s/metrics.jsonl").unlink()
    p = begun(tmp_path, ["--resume", ENDLESS],
              preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    p.send_signal(signal.SIGHUP)
    at = last_step(tmp_path / "runs/s")
    while last_step(tmp_path / "runs/s") < at + 20 and p.poll() is None:
        time.sleep(0.05)
    p.send_signal(signal.SIGTERM)
    out, _ = p.communicate(timeout=PATIENCE)
    assert p.returncode == 0 and "SIGHUP" not in out
    assert "SIGTERM: finishing this step, then saving; again to stop now" in out


def test_a_signal_while_data_is_waited_for_ends_the_wait(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 99

        def __getitem__(self, i):
            if t.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(3600)
            return rows()[0]
    t = Trainer(Bigram(), short_config(tmp_path), Slow())
    t.train()
    assert t.stop_signal == "SIGTERM" and saved_by(t) == ["step_000000000002.pt"]


@pytest.mark.parametrize("script", ["train.py", "master.py", "worker.py"])
@pytest.mark.parametrize("after", [0.05, 0.2])
def test_a_signal_before_the_first_step_ends_at_once(tmp_path, script, after):
    code = f"""import os, runpy, signal, sys, threading
sys.argv, sys.path[:0] = ["{script}", "--node-id=a"], ["{HERE}"]
import config
real = config.leave_on_signals
def ready():
    real()
    threading.Timer({after}, os.kill, (os.getpid(), signal.SIGINT)).start()
config.leave_on_signals = ready
runpy.run_path("{HERE}/{script}", run_name="__main__")"""
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout.endswith("stop     at once: no training is under way\n")
    assert not (tmp_path / "runs/small").exists()


def test_killed_at_any_moment_the_resumed_run_is_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--config=smoke", "--data.path=stdlib", "--dropout=0.1", "--micro-batch-size=4",
             "--target-batch-size=8", "--max-steps=24", "--checkpoint.every-steps=4",
             "--logging.every-steps=1", "--eval-every=8", "--d-model=128", "--n-layer=4",
             "--device=cpu"]
    assert train.main([*flags, "--name=whole"]) is None
    whole, folder = tmp_path / "runs/whole", tmp_path / "runs/s"
    for workers, moment in [
            (0, lambda f: last_step(f) >= 3),                        # before any checkpoint
            (2, lambda f: (f / "step_000000000012.pt").exists()),    # right after one
            (0, lambda f: last_step(f) >= 13 and list(f.glob("step_*.tmp")))]:  # half written
        if not (resume := bool(list(folder.glob("step_*.pt")))):
            shutil.rmtree(folder, ignore_errors=True)   # a run that has saved nothing begins again
        p = begun(tmp_path, [*flags, "--name=s", f"--num-workers={workers}", f"--resume={resume}"],
                  moment, stdout=subprocess.DEVNULL)
        p.kill()
        assert p.wait() == -signal.SIGKILL, "it ended before"
    assert list(folder.glob("*.tmp")), "the kill came too late to leave a half-written file"
    assert train.main([*flags, "--name=s", "--resume", "--num-workers=2"]) is None
    a, b = (read_checkpoint(f / "step_000000000024.pt") for f in (whole, folder))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    for old, new in zip(a["optimizers"], b["optimizers"]):
        assert all(torch.equal(v, new["state"][i][k])
                   for i, state in old["state"].items() for k, v in state.items())
    assert a["position"] == b["position"] and a["best"] == b["best"]
    for event, key, count in (("step", "loss", 24), ("eval", "val_loss", 3)):
        one, other = ([(line["step"], line[key]) for line in lines_of(f, event)]
                      for f in (whole, folder))
        assert one == other and len(one) == count


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_well(tmp_path, number):
    p = begun(tmp_path, [ENDLESS, "--num-workers=1"], start_new_session=True)
    os.killpg(p.pid, number)    # to the whole group, as a terminal or a batch system does
    out, err = p.communicate(timeout=PATIENCE)
    assert p.returncode == 0 and "--resume goes on from step" in out and not err, err
    step = int(out.split("from step")[1])
    assert last_step(tmp_path / "runs/s") == step and saved_at_its_end(tmp_path)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of unusable things, and one run."""
    folder = tmp_path_factory.mktemp("bad")
    np.save(folder / "float.npy", np.zeros(5000))
    put(folder, {"empty.txt": "", "short.txt": "too short", "odd.bin": "123",
                 "big.bin": np.full(5000, 300, "<u2").tobytes(), "file": "a file, not a folder",
                 "torn.npy": (folder / "float.npy").read_bytes()[:60]})
    assert train.main(["--config=smoke", "--name=used", "--max-steps=4",
                       f"--output-dir={folder}/runs"]) is None
    return folder


@pytest.mark.parametrize("flags, says", [
    (["--data.path=nowhere.txt"], "nothing there"), (["--data.path=empty.txt"], "is empty"),
    (["--data.path=short.txt"], "too short"), (["--val-path=short.txt"], "too short"),
    (["--data.path=odd.bin"], "no whole number of tokens"), (["--data.path=float.npy"], "integers"),
    (["--data.path=torn.npy"], "no .npy file"), (["--data.path=big.bin"], "token 300"),
    (["--data.path=big.bin", "--num-workers=1"], "token 300"),
    (["--model.name=nope"], "reference_transformer"), (["--model.name=no.such:f"], "no.such:f"),
    (["--device=cuda:7"], "run.device=cuda:7"), (["--output-dir=file"], "cannot write"),
    (["--name=used"], "already holds a run"), (["--name=new", "--resume"], "no usable checkpoint"),
    (["--name=used", "--resume", "--n-layer=3"], "of another model"), (["--lrate=1"], "nearest"),
    (["--lr=1e30", "--grad-clip=0"], "not finite"), (["--name=none", "--plot"], "there are: "),
])
def test_refusals_are_one_line_and_exit_2(bad, monkeypatch, flags, says):
    before = {p: p.read_bytes() for p in (bad / "runs/used").iterdir()}
    args = ["--config=smoke", "--name=r", *flags]       # the last --name counts
    if says == "not finite":    # the others without a process of their own
        done = run_script(args, bad)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        said = done.stderr[:-1]
    else:
        monkeypatch.chdir(bad)
        said = train.main(args)
    assert says in said and "\n" not in said and "Traceback" not in said
    assert before == {p: p.read_bytes() for p in (bad / "runs/used").iterdir()}, \
        "a refused start must not touch the run"


def test_full_disk_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = [*SILENT, "--eval-every=4", "--max-steps=8"]
    assert train.main([*args, "--max-steps=4"]) is None
    folder = tmp_path / "runs/s"
    size = (folder / "step_000000000004.pt").stat().st_size
    done = run_script([*args, "--resume"], tmp_path, preexec_fn=limited(size // 2))
    assert done.returncode == 2 and "cannot write" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1
    assert (sorted(p.name for p in folder.iterdir())
            == [".lock", "best.pt", "latest.json", "metrics.jsonl", "step_000000000004.pt"])
    assert train.main([*args, "--resume"]) is None


def test_a_run_is_sampled_and_exported_without_training(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run = functools.partial(train_main, capfd, "--config=smoke")
    said, out = run("--max-steps=6", "--sample=def ", "--eval-every=3", "--tokens=120")
    assert said is None and out.count("sample   ---") == 2
    assert out.index("sample ") < out.index("step     6/6"), "at each evaluation"
    newest = tmp_path / "runs/smoke/step_000000000006.pt"
    before = newest.read_bytes()
    said, out = run("--max-steps=99", "--resume", "--sample=x = ", "--export=out")
    assert said is None and "\nstep " not in out and "at step 6: no training" in out
    assert re.search(r"sample   -+\nx = ", out) and before == newest.read_bytes()
    assert (sorted(p.name for p in (tmp_path / "out").iterdir())
            == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                "tokenizer_config.json"])
    model = torch.load(newest, weights_only=True)["model"]
    assert all(torch.equal(model[k], v)
               for k, v in load_file(tmp_path / "out/model.safetensors").items())
    assert run("--name=more", "--max-steps=2", "--init-from=out")[0] is None
    said, _ = run("--name=w", "--init-from=runs")
    assert "no config.json" in said and "\n" not in said


def test_the_commands_and_the_code_of_the_readme(tmp_path, monkeypatch, capfd):
    text = (HERE / "README.md").read_text(encoding="utf-8")
    for file in [*HERE.glob("*.py"), HERE / "README.md"]:
        shutil.copy(file, tmp_path)
    codes = re.findall(r"```python\n(.*?)```", text, re.S)
    assert all(f"from {leaf} import" in "".join(codes)
               for leaf in ("config", "model", "trainer", "diloco"))
    for code in codes:
        done = run_python("-c", code, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout and not done.stderr, (code, done.stderr)
    state, _ = diloco.load_global(diloco.open_hub(str(tmp_path / "runs/plain")))
    assert state.finished and state.curve[-1][2] < state.curve[0][2] / 1.5, "a plain loop learns"
    assert "load_global(diloco.open_hub('./runs/plain'))" in done.stdout, "no family for --export"
    assert (state.nodes["a"].steps, state.nodes["a"].lost) == (400, 0)
    monkeypatch.chdir(tmp_path)
    put(tmp_path, dict.fromkeys(("train.bin", "val.bin"), np.arange(5000, dtype="<u2").tobytes()))
    commands = re.findall(r"^(?:pip install \S+ \S+ && )?python (train\.py[^#\n]*)", text, re.M)
    assert len(commands) >= 12
    for command in commands:    # each as written, in their order, but short and small
        brief = {"--max-steps": 2, "--sample": "", "--eval-batches": 1, "--data.num-workers": 0,
                 "--n-layer": 1, "--d-model": 48, "--n-head": 2}
        if "gpt2" in command:
            brief |= {"--block-size": 64, "--micro-batch-size": 1, "--target-batch-size": 1,
                      "--vocab-size": 5000, "--compile": "false"}
        asked = {flag.split("=")[0] for flag in shlex.split(command)}
        asked -= {"--max-steps", "--compile"}       # these are set here in any case
        args = shlex.split(command)[1:]
        args += [f"{flag}={value}" for flag, value in brief.items() if flag not in asked]
        capfd.readouterr()
        if command == commands[0]:
            assert run_script(args, tmp_path).returncode == 0
        else:                   # the same without a process for each
            with contextlib.suppress(SystemExit):       # of --help
                assert train.main(args) is None, command
            out, err = capfd.readouterr()
            assert out and not err, (command, err)
    assert (tmp_path / "runs/loss.svg").exists() and (tmp_path / "out/config.json").exists()


def test_defaults_of_the_trainer_are_those_of_the_config():
    for section, values in trainer_module.DEFAULTS.items():
        assert values == {k: config_module.base[section][k] for k in values} | (
            {"name": "small"} if section == "run" else {})


@pytest.mark.parametrize("leaf", ["config", "model", "trainer", "diloco"])
def test_each_leaf_works_alone(tmp_path, leaf):
    """Copied into an empty folder it imports, prints nothing and needs no sibling."""
    shutil.copy(HERE / f"{leaf}.py", tmp_path)
    done = run_python("-c", f"import {leaf}", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == [f"{leaf}.py"]

# ---- diloco.py: a loopback Hub that the real client talks to
# (a stand-in for the Hub, with faults; it checks nothing itself)


class LoopbackHub(ThreadingHTTPServer):
    """Enough of the Hub for huggingface_hub without Xet: model repos, LFS, atomic commits.

    `fault` lets the next requests fail, `rename` sends on to another name. `latency` (s a request)
    and `rate` (bytes a second of one connection) make it far away.
    """
    daemon_threads, latency, rate = True, 0.0, math.inf

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.guard, self.repos, self.objects = threading.RLock(), {}, {}
        self.faults, self.moves, self.counts, self.bytes = [], {}, Counter(), Counter()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def push(self, repo, files):
        sha = hashlib.sha1(os.urandom(8)).hexdigest()
        self.repos.setdefault(repo, []).append((sha, files))
        return sha

    def at(self, repo, revision="main"):
        """(commit, {path: sha256})"""
        if repo not in self.repos:
            raise LookupError("RepoNotFound")
        for sha, files in reversed(self.repos[repo]):
            if revision in ("main", sha):
                return sha, files
        raise LookupError("RevisionNotFound")

    def info(self, path, oid):
        data = self.objects[oid]
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        lfs = {"lfs": {"oid": oid, "size": len(data), "pointerSize": 134}}
        return {"type": "file", "path": path, "size": len(data), "oid": git,
                **(lfs if path.endswith(".safetensors") else {})}

    def fault(self, method, path, action, count=1, says=None, **headers):
        """For the next `count` requests that fit: a status, "reset", "lose" the answer, or
        "corrupt" it."""
        answer = action, {"error": says or f"status {action}"}, headers
        self.faults += [(method, path, action, answer)] * count

    def trouble(self, method, path):
        for fault in self.faults:
            if fault[0] == method and re.search(fault[1], path):
                self.faults.remove(fault)
                return fault[2:]
        return None, None

    def rename(self, old, new, status):
        self.repos[new], self.moves[old] = self.repos.pop(old), (status, new)


class Answer(BaseHTTPRequestHandler):
    """One request. The methods below return (status, body, headers)."""
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def handle_one(self):
        hub, url = self.server, urlsplit(self.path)
        path, self.query = unquote(url.path), parse_qs(url.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.bytes["in"] += len(self.body)
        time.sleep(hub.latency + len(self.body) / hub.rate)
        route = re.sub(r"^/api/models/[^/]+/[^/]+", "", re.sub(r"[0-9a-f]{40,64}", "SHA", path))
        hub.counts[f"{self.command} {route}"] += 1
        action, answer = hub.trouble(self.command, path)
        if action == "reset":
            return self.connection.shutdown(2)
        if not isinstance(action, int):
            with hub.guard:
                answer = self.route(path)
        if action == "lose":
            return self.connection.shutdown(2)
        self.reply(*answer, flip=action == "corrupt")    # unguarded: nobody waits for a download

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    def reply(self, status, body, headers, flip):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        if flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(status)
        for k, v in {"Content-Length": len(body), **headers}.items():
            self.send_header(k.replace("_", "-"), str(v))
        self.end_headers()
        if self.command != "HEAD":
            time.sleep(len(body) / self.server.rate)
            self.wfile.write(body)
            self.server.bytes["out"] += len(body)

    def route(self, path):
        for old, (status, new) in self.server.moves.items():
            if re.search(rf"/{old}(?=[/.]|$)", path):
                return status, b"", {"Location": self.path.replace(f"/{old}", f"/{new}", 1)}
        routes = {r"/api/repos/create": self.create, r"/lfs/(\w+)": self.upload,
                  r"/api/validate-yaml": lambda: (200, {}, {}),
                  r"/.+/.+\.git/info/lfs/objects/batch": self.batch,
                  r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)": self.resolve,
                  r"/api/models/([^/]+/[^/]+)(?:/([^/]+)/([^/]+)(?:/(.*))?)?": self.repository}
        for pattern, answer in routes.items():
            if match := re.fullmatch(pattern, path):
                try:
                    return answer(*match.groups())
                except LookupError as e:
                    return 404, {"error": e.args[0]}, {"X-Error-Code": e.args[0]}
        return 404, {}, {}

    def create(self):
        made, hub = json.loads(self.body), self.server
        name = f"{made.get('organization') or 'me'}/{made['name']}"
        status = 409 if name in hub.repos else 200
        if status == 200:
            hub.push(name, {})
        return status, {"url": f"{hub.url}/{name}", "id": name}, {}

    def upload(self, oid):
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.server.objects[oid] = self.body
        return 200, b"", {}

    def batch(self):
        hub, objects = self.server, json.loads(self.body)["objects"]
        for o in objects:
            if o["oid"] not in hub.objects:     # else it is there: nothing to do
                o["actions"] = {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}
        return (200, {"transfer": "basic", "objects": objects},
                {"Content-Type": "application/vnd.git-lfs+json"})

    def resolve(self, repo, revision, path):
        sha, files = self.server.at(repo, revision)
        if path not in files:
            return 404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
        info = self.server.info(path, files[path])
        etag = files[path] if "lfs" in info else info["oid"]
        return 200, self.server.objects[files[path]], {"X-Repo-Commit": sha, "ETag": f'"{etag}"'}

    def repository(self, repo, verb, revision, rest):
        hub = self.server
        sha, files = hub.at(repo, revision or "main")
        if (verb in ("preupload", "commit", "super-squash")) != (self.command == "POST"):
            return 405, {}, {}
        if verb == "tree":
            return self.tree([hub.info(p, o) for p, o in sorted(files.items())
                              if p.startswith(f"{rest}/" if rest else "")])
        if verb == "preupload":
            return 200, {"files": [
                {"path": f["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in json.loads(self.body)["files"]]}, {}
        if verb == "super-squash":
            hub.repos[repo] = []
            return 200, {"commitId": hub.push(repo, files)}, {}
        if verb == "commit":
            return self.commit(repo, sha, dict(files))
        return 200, {"id": repo, "sha": sha, "siblings": [], "private": True, "tags": []}, {}

    def tree(self, under):
        if not under:
            raise LookupError("EntryNotFound")
        first = int(self.query.get("cursor", ["0"])[0])
        url = f"{self.server.url}{self.path.partition('?')[0]}?recursive=true&cursor={first + 100}"
        more = {"Link": f'<{url}>; rel="next"'} if len(under) > first + 100 else {}
        return 200, under[first:first + 100], more

    def commit(self, repo, sha, files):
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, sha):
                return 412, {"error": "a commit has happened since"}, {}
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
                oid = files[value["path"]] = hashlib.sha256(data).hexdigest()
                self.server.objects[oid] = data
            if line["key"] == "lfsFile":
                files[value["path"]] = value["oid"]
            if line["key"] == "deletedFile" and files.pop(value["path"], None) is None:
                raise LookupError("EntryNotFound")
        sha = self.server.push(repo, files)
        return 200, {"success": True, "commitOid": sha,
                     "commitUrl": f"{self.server.url}/{repo}/commit/{sha}"}, {}


@pytest.fixture(scope="session", autouse=True)
def hub(tmp_path_factory):
    """One loopback Hub, and the environment in which the client talks to it."""
    server = LoopbackHub()
    os.environ |= {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1",
                   "HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_DISABLE_TELEMETRY": "1"}
    assert "huggingface_hub" not in sys.modules, "the client reads its environment once, at import"
    yield server
    server.shutdown()
    server.server_close()

# ---- diloco.py: the laws
# - an outer step is Nesterov's; nodes are averaged, the order of arrival cannot change a bit
# - no work is lost or doubled, whatever is killed, lost, refused or started twice
# - a node's weights are G, minus what is in flight, minus the remainder
# - all nodes decay with the tokens of the swarm, and a round waits for those at work alone
# - two masters never publish both; the newest process of a node goes on
# - a model is never written over, and what is lost or damaged is mended by the master that runs
# - bad deltas are refused by name; no node decides for all by size, loss, step or clock

SWARM = {**config_module.base["distributed"], "codec": "fp32", "outer_warmup": 0,
         "poll_interval": 0.05, "round_timeout": 1e-9, "max_norm_ratio": 0.0, "keyframe_every": 3,
         "commits_per_hour": 0}
PLAIN = dict(outer_lr=1.0, outer_momentum=0.0)      # the global model is the sum of all work


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(99, 16)), nn.Parameter(torch.zeros(5))
        self.register_buffer("stat", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Later:
    """A Job that runs when the test says so."""

    def __init__(self, work, *arguments):
        self.work, self.arguments, self.ended, self.result, self.error = (
            work, arguments, False, None, None)
        self.thread = types.SimpleNamespace(join=lambda timeout: None)

    def run(self):
        try:
            self.result = self.work(*self.arguments)
        except Exception as e:
            self.error = e
        self.ended = True


class Node(diloco.PlainTrainer):
    """A trainer with its DumbDiLoCo. Without threads, nothing is sent or received until the test
    calls for it."""
    make = Net

    def __init__(self, transport, name="a", saved=None, threads=False, **settings):
        super().__init__(self.make(), max_steps=10**9, batch_size=2)
        self.last_loss, self.events = torch.tensor(1.0), []
        self.work = {k: torch.zeros_like(v) for k, v in diloco.swarm_tensors(self.model).items()}
        self.node = diloco.DumbDiLoCo(transport, name, {**SWARM, **settings})
        if not threads:
            self.node.job, self.node.begin_look = Later, lambda: None
            # without a clock no node has a speed, and none is early
            self.node.loop_steps = lambda: self.node.settings["inner_steps"]
            self.node.keep_in_step = lambda: None
        if saved:
            self.model.load_state_dict(saved["model"])
            self.step, self.position, self.tokens = (
                saved["step"], saved["step"] * 2, saved["tokens"])
            self.node.load_state_dict(saved["coordinator"])
        self.node.start(self)

    def emit(self, event, line, **payload):
        self.events.append((event, payload))

    def train(self, steps=1, size=0.25):
        for _ in range(steps):
            self.step, self.tokens = self.step + 1, self.tokens + 10
            for k, v in diloco.swarm_tensors(self.model).items():
                # multiples of a power of two: sums are exact
                move = torch.randint(-8, 9, v.shape) * size
                self.work[k] += move
                with torch.no_grad():
                    v += move

    def upload(self):
        if self.node.uploading and not self.node.uploading[1].ended:
            self.node.uploading[1].run()

    def send(self, steps=0, **how):
        self.train(steps, **how)
        self.node.push(self)
        self.upload()

    def look(self):
        self.node.looking = Later(self.node.look, (self.node.tag, self.node.state))
        self.node.looking.run()

    def see(self):
        self.look()
        self.node.take_results(self)

    def weights(self):
        return {k: v.detach().clone() for k, v in diloco.swarm_tensors(self.model).items()}

    def save(self):
        state = {"model": self.model.state_dict(), "step": self.step,
                 "tokens": self.tokens, "coordinator": self.node.state_dict()}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)


def make_master(transport, **settings):
    log = []
    config = settings.pop("config", {})
    master = diloco.MasterOuterLoop(transport, {**SWARM, **settings}, diloco.swarm_tensors(Net()),
                                    {"config": config, "buffers": ["stat"]}, log=log.append)
    master.lines = log
    return master


def exchange(master, *nodes, steps=1, **how):
    """A round: each trains and sends, the master merges, each sees it. Returns the outer step."""
    for node in nodes:
        node.send(steps, **how)
    outer_step = master.sync_once()
    for node in nodes:
        node.see()
    return outer_step


def same(one, other, atol=0.0):
    """Whether two dicts of tensors are equal, to the bit or within a distance."""
    return all(torch.allclose(v, other[k], rtol=0, atol=atol) for k, v in one.items())


def counts(master, node="a"):
    """(local step, merged, lost) of a node's entry."""
    entry = master.state.nodes[node]
    return entry.local_step, entry.steps, entry.lost


def history_of(transport):
    """The lines of all segments, in order."""
    segments = [path for path, _, _ in transport.list("global/") if "history" in path]
    segments.sort(key=lambda path: int(re.search(r"\d+", path)[0]))
    return [json.loads(line) for path in segments
            for line in transport.read(path)[1].splitlines()]


@pytest.fixture
def folder(tmp_path):
    return diloco.FolderTransport(tmp_path / "hub")


def test_nesterov_is_torch_sgd_and_the_momentum_is_read_off_the_path():
    torch.manual_seed(0)
    w, buf = {"w": torch.randn(8, 50)}, torch.zeros(8, 50)
    p = nn.Parameter(w["w"].clone())
    sgd = torch.optim.SGD([p], lr=0.7, momentum=0.9, nesterov=True)
    shapes = diloco.shapes_of(w)
    for _ in range(20):
        g = torch.randn(8, 50)
        update = diloco.Update(1.0, 0.9, 0.9, 0.7, False, "fp32", [], shapes, None)
        update.stored = diloco.encode({"w": diloco.nesterov(g, buf, update)}, "fp32")
        diloco.fold(update, "w", ..., w["w"], buf)
        p.grad = g
        sgd.step()
        assert torch.allclose(buf, sgd.state[p]["momentum_buffer"], rtol=1e-4, atol=1e-4)
    assert torch.allclose(w["w"], p, rtol=1e-5, atol=1e-5)
    settings = {"outer_momentum": 0.8, "outer_warmup": 4}
    assert [diloco.outer_momentum(settings, n) for n in (0, 1, 3, 9)] == [0.2, 0.4, 0.8, 0.8]
    falling = [diloco.outer_momentum(settings, 9, left) for left in (7.0, 3.0, 1.5, 0.0)]
    assert falling == [0.8, 0.8, 0.4, 0.0]
    half = diloco.Update(0.5, 0.4, 0.4 ** 0.5, 1.0, False, "fp32", [], shapes, None)
    u = diloco.nesterov(torch.zeros(1), torch.ones(1), half)
    assert u.item() == pytest.approx(0.5 * 0.4 * 0.4 ** 0.5)


@pytest.mark.parametrize("seed, codec", [*enumerate(diloco.CODECS)])
def test_carry_and_baseline_no_work_is_ever_lost(folder, seed, codec):
    """With a plain outer sum, whatever the interleaving, a node's weights are all it has
    learned."""
    chance, master = random.Random(seed), make_master(folder, codec=codec, **PLAIN)
    a = Node(folder, codec=codec, max_pending=99)
    rounding = {"fp32": 0, "bf16": 0.2, "int8": 0.2, "int4": 2, "int2": 10}[codec]
    for _ in range(80):
        action = chance.choice(["train", "train", "send", "answer", "merge", "see"])
        if action == "train":
            a.train()
        elif action == "send" and not a.node.uploading:
            a.send()
        elif action == "answer":
            a.node.take_results(a)
        elif action == "merge":
            master.sync_once()
        elif action == "see":
            a.see()
        assert same(a.weights(), a.work, rounding)
    # what the rounding of deltas held back goes out with the next ones
    a.node.take_results(a)
    for _ in range(40):
        exchange(master, a, size=0.0)
    # four levels mend an outlier slowly
    assert same(a.weights(), master.weights,
                {"fp32": 1e-5, "bf16": 1e-3, "int8": 1e-3, "int4": 5e-3, "int2": 1.0}[codec])
    # the rounding of updates is part of the path that all have taken
    assert same(a.work, master.weights,
                {"fp32": 1e-5, "bf16": 0.2, "int8": 0.3, "int4": 0.5, "int2": 1.0}[codec])
    assert counts(master) == (a.step, a.step, 0) and master.state.nodes["a"].tokens == a.tokens


def test_the_master_fetches_the_deltas_of_a_round_side_by_side(tmp_path):
    together = threading.Barrier(3)

    class Meeting(diloco.FolderTransport):
        def fetch(self, path, *args):
            if path.startswith("nodes/"):
                together.wait(timeout=PATIENCE)       # nobody goes on before three are here
            super().fetch(path, *args)
    master = make_master(Meeting(tmp_path / "hub"))
    nodes = [Node(diloco.FolderTransport(tmp_path / "hub"), name) for name in "abc"]
    assert exchange(master, *nodes) == 1 and sorted(master.state.nodes) == ["a", "b", "c"]
    assert not list(master.folder.glob("nodes_*"))      # what was fetched is gone


def test_two_nodes_average_and_buffers_average_without_momentum(folder):
    master = make_master(folder, outer_lr=0.5, outer_momentum=0.9)
    a, b = Node(folder, "a"), Node(folder, "b")
    a.send(4)
    a.node.take_results(a)
    a.send(4)               # two deltas of one node add up, they are not averaged
    b.send(4)
    assert master.sync_once() == 1
    for k, v in master.weights.items():
        mean = (a.work[k] + b.work[k]) / 2
        assert torch.allclose(v, mean if k == "stat" else 0.5 * 1.9 * mean, atol=1e-5), k
    assert master.sync_once() == 1, "nothing there, nothing happens"


def test_order_of_arrival_cannot_change_a_bit(tmp_path):
    results = []
    for order in ("abc", "cab"):
        hub = diloco.FolderTransport(tmp_path / order)
        master = make_master(hub)
        torch.manual_seed(5)
        nodes = {name: Node(hub, name) for name in "abc"}
        for name in "abc":
            nodes[name].train(3, size=0.1)
        for name in order:
            nodes[name].send()
        master.sync_once()
        results.append(master.weights)
    assert same(*results)


class Stop(BaseException):
    """A kill, between two calls to the transport."""


class Shaky:
    """A transport that dies, or loses its answer, at its n-th call."""

    def __init__(self, transport, n=10**9, how="before"):
        self.transport, self.left, self.how = transport, n, how

    def __getattr__(self, name):
        call = getattr(self.transport, name)
        if not callable(call):
            return call

        def shaky(*args, **kwargs):
            self.left -= 1
            if self.left == 0 and self.how == "before":
                raise Stop
            result = call(*args, **kwargs)
            if self.left == 0:
                raise diloco.Unavailable("a lost answer")
            return result
        return shaky


def test_an_upload_that_the_end_cuts_off_is_sent_by_the_next_process(folder, monkeypatch):
    """Ctrl-C while the hub cannot be reached: no failure, and nothing is lost."""
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    master, a, real = make_master(folder, **PLAIN), Node(folder), folder.commit

    def away(*args, **kwargs):
        a.node.closing, a.stop_signal = True, "SIGINT"
        raise diloco.Unavailable("no route to the hub")
    folder.commit = away
    a.send(3)
    a.node.finish(a)
    folder.commit = real
    assert not a.node.failed
    again = Node(folder, saved=a.save())
    assert same(again.weights(), a.work) and again.step == 3
    exchange(master, again)
    assert counts(master) == (4, 4, 0) and same(again.weights(), master.weights)


def test_nodes_that_have_finished_are_not_waited_for_but_count(folder):
    """Else the last one at work would move the model as far as all did."""
    master = make_master(folder, round_timeout=1e9, outer_lr=0.5, outer_momentum=0.0)
    a, b = Node(folder), Node(folder, "b")
    b.node.target = 3
    for node, steps in ((a, 1), (b, 2)):
        node.send(steps)
        node.node.take_results(node)
    master.sync_once()
    assert master.active() == {"a", "b"} and not master.due({"a"})
    b.send(1)
    exchange(master, a)
    assert master.active() == {"a"} and master.due({"a"})
    before = {k: v.clone() for k, v in master.weights.items()}
    a.train()
    delta = a.node.local.remainders()
    a.send()
    assert master.sync_once() == 3
    assert all(torch.allclose(v, before[k] - 0.5 * delta[k] / 2) for k, v in master.weights.items()
               if k != "stat")


def test_while_something_is_on_its_way_a_worker_is_where_the_momentum_will_be(folder):
    """It knows the momentum from the updates alone, leaves G by the next step of the momentum
    when it sends, and is back at what G says when all is merged."""
    settings = dict(outer_lr=0.5, outer_momentum=0.8, outer_warmup=4)
    master, a = make_master(folder, **settings), Node(folder)

    def expected(ahead):
        mu = diloco.outer_momentum(master.settings, a.node.state.outer_step)
        shift = {k: 0.5 * mu ** 2 * v * (k != "stat") for k, v in a.node.local.momentum.items()}
        sent = [{k: d.piece(k, ...) for k in d.shapes} for d in a.node.local.in_flight]
        return {k: v - ahead * shift[k] - sum(d[k] for d in sent)
                for k, v in a.node.local.G.items()}
    for i in range(6):
        a.send(2)
        assert same(a.weights(), expected(True), 1e-4)
        master.sync_once()
        a.see()
        assert not a.node.local.ahead and not a.node.local.in_flight
        assert same(a.weights(), master.weights, 1e-4)
        assert same(a.node.local.momentum, master.momentum)
    a.send(1)
    a.train(1)
    was, on, off = a.weights(), expected(True), expected(False)
    again = Node(folder, saved=a.save())        # killed and started again while it is ahead
    assert a.node.local.ahead and not again.node.local.ahead
    assert same(again.weights(), {k: off[k] + was[k] - on[k] for k in was}, 1e-4)


@pytest.mark.parametrize("steps, rounds, fate, inner_steps, part", [
    # the least of 2 * delay * delay and 0.75, times the momentum there, or a short loop's share
    (25, 1, "merged", 50, 0.5 * 0.64), (60, 1, "merged", 50, 0.75 * 0.64),
    (5, 1, "merged", 50, 0.02 * 0.64), (25, 2, "merged", 50, 0), (25, 1, "lost", 50, 0.32),
    (25, 1, "refused", 50, 0.32), (25, 1, "merged", 20, 0.75), (25, 1, "merged", 32, 0.75 / 1.28)])
def test_a_new_global_that_was_foreseen_wrongly_is_followed_in_part(folder, steps, rounds, fate,
                                                                   inner_steps, part):
    """What the steps since the last delta have undone of the error is not done again, and goes out
    with the next delta. A delta that will never be merged is no such error."""
    master = make_master(folder, outer_momentum=0.8, outer_warmup=5)
    a, b = (Node(folder, name, max_pending=9, inner_steps=inner_steps) for name in "ab")

    def everyone(*nodes):
        for node in nodes:
            node.send(1)
            node.node.take_results(node)
    for _ in range(2):
        everyone(a, b)
        master.sync_once()
        a.see()
        b.see()
    everyone(a)
    gone, path = a.node.local.in_flight[-1], f"nodes/a/delta_{a.step}.safetensors"
    gone = {k: gone.piece(k, ...) for k in gone.shapes}
    if fate == "refused":
        folder.commit({path: b"none"})
    elif fate == "lost":
        folder.commit({}, [path])
    everyone(a, b)
    a.train(steps)
    was, unsent = a.weights(), a.node.local.remainders()
    taken = {k: a.node.local.baseline(k, ...) for k in was}
    for _ in range(rounds):
        master.sync_once()
        everyone(b)
    a.see()
    new, back = a.node.local.G, {k: (fate != "merged") * v for k, v in gone.items()}
    assert a.node.state.outer_step == 2 + rounds and a.node.local.ahead == 0
    left = {k: unsent[k] + back[k] * (fate == "lost") + part * (new[k] - taken[k] - back[k])
            for k in new}
    assert all(torch.equal(a.node.local.baseline(k, ...), v) for k, v in new.items())
    assert all(torch.allclose(v, new[k] - left[k], atol=1e-4) for k, v in a.weights().items())
    assert not torch.allclose(a.weights()["w"], was["w"], atol=0.1)
    a.send()
    sent = a.node.local.in_flight[-1]
    assert all(torch.allclose(sent.piece(k, ...), v, atol=1e-4) for k, v in left.items())


@pytest.mark.parametrize("seed", range(2))
def test_what_was_lost_on_the_way_is_sent_again_once(folder, seed):
    """Whatever is deleted before it is merged: once all is merged the global model is all that the
    node has learned, and the books say so. What was refused is not sent again."""
    chance, master = random.Random(seed), make_master(folder, **PLAIN)
    a = Node(folder, max_pending=99)
    for _ in range(40):
        a.send(1)
        if chance.random() < 0.4:
            folder.commit({}, [path for path, _, _ in folder.list("nodes/")])
        a.node.take_results(a)
        if chance.random() < 0.5:
            master.sync_once()
        if chance.random() < 0.5:
            a.see()
    for _ in range(3):      # nothing is lost any more
        exchange(master, a)
    assert len(master.state.nodes["a"].gaps) > 3 and counts(master) == (43, 43, 0)
    assert master.state.nodes["a"].tokens == a.tokens
    assert same(a.weights(), master.weights)
    del master.weights["stat"]
    assert same(master.weights, a.work)


def test_all_nodes_decay_with_the_tokens_of_the_swarm(folder):
    """A fast node's learning rate waits for the slow ones, theirs goes ahead."""
    master = make_master(folder, round_timeout=1e9)
    fast, slow = Node(folder, "fast"), Node(folder, "slow")
    assert fast.node.schedule_step(7) == 7
    slow.send(20)
    exchange(master, fast, steps=30)
    slow.see()
    assert fast.node.schedule_step(30) == 25 == slow.node.schedule_step(20)
    assert fast.node.schedule_step(34) == 29 == slow.node.schedule_step(24)
    assert Node(folder, "late").node.schedule_step(30) == 30, "not booked yet"
    books = fast.node.state.nodes
    books["slow"].local_step = 14           # not half as far: it holds nobody back
    assert fast.node.schedule_step(31) == 31
    books["slow"].local_step = 40
    books["slow"].final = True              # it has finished, and is ahead of all at work
    assert fast.node.schedule_step(30) == 35
    books["slow"].local_step = 29           # it has finished and was overtaken
    assert fast.node.schedule_step(30) == 30 and diloco.members(books, 1) == {"fast"}


def test_two_masters_one_stops(folder):
    one, two, a = make_master(folder), make_master(folder), Node(folder)
    a.send(1)
    with pytest.raises(diloco.Refused, match="another master"):
        one.sync_once()
    assert two.sync_once() == 1
    a.see()
    a.send(1)
    assert make_master(folder).sync_once() == 2, "a master started again takes over at once"


@pytest.mark.parametrize("kind", ["hub", "folder"])
def test_the_repository_is_a_model_with_a_page(request, monkeypatch, kind):
    """model.safetensors is the keyframe and costs no second upload; the page is a commit of its
    own, and what the owner writes on it stays, also when he writes meanwhile."""
    transport = request.getfixturevalue("remote" if kind == "hub" else "folder")
    server = request.getfixturevalue("hub") if kind == "hub" else None
    settings = {**SWARM, "hub": "me/swarm", "license": "mit", "codec": "int4", "keyframe_every": 1}
    torch.manual_seed(0)
    tensors = {k: v.detach() for k, v in diloco.swarm_tensors(nn.Linear(256, 256)).items()}
    config = {"run": {"max_steps": 10}, "model": {"name": "gpt"}, "data": {"path": "stdlib"}}
    before, log = server.bytes["in"] if server else 0, []
    master = diloco.MasterOuterLoop(transport, settings, tensors, {"config": config}, files={
        "config.json": b"{}"}, draw=lambda curves: f"<svg>{curves}</svg>", log=log.append)
    if server:      # weights, momentum in bf16: base64 and headers are small change
        assert server.bytes["in"] - before < 1.7 * sum(v.nbytes for v in tensors.values())
    monkeypatch.setattr(Node, "make", lambda self: nn.Linear(256, 256))
    node = Node(transport, codec="int4")

    def text(path=diloco.PAGE):
        return transport.read(path)[1].decode()

    def publish():
        exchange(master, node)
        master.publish_page()
    publish()
    for name in (diloco.WEIGHTS, diloco.MODEL):
        transport.fetch(name, transport.head()[0], master.folder / "there")
        assert same(master.weights, load_file(master.folder / "there"))
    assert text("config.json") == "{}" and "license: mit" in text() and "--hub=me/swarm" in text()
    assert "Outer step 1, step 1 of 10" in text() and "| a | 20" in text() and "10 tokens" in text()
    assert "(1, 1.0)" in text(diloco.CURVE) and diloco.CURVE in text()
    mine = text().replace("# swarm", "# My swarm\nHello.") + "Written below.\n"
    transport.commit({diloco.PAGE: mine.encode()})
    publish()
    assert "Outer step 2" in text()
    assert text().split(diloco.BEGIN)[0] == mine.split(diloco.BEGIN)[0]
    assert text().split(diloco.END)[1] == mine.split(diloco.END)[1]

    def meanwhile(curves):      # the owner writes between reading and publishing
        transport.commit({diloco.PAGE: b"All my own." + diloco.BEGIN.encode()})
        return "<svg/>"
    master.draw = meanwhile
    publish()
    assert text() == "All my own." + diloco.BEGIN and "stays as it is" in log[-1]

    def no_picture(curves):
        raise ValueError("matplotlib is missing")
    master.draw = no_picture
    if server:      # metadata that the Hub does not take
        server.fault("POST", "/validate-yaml", 400)
        publish()
        assert text() == "All my own." + diloco.BEGIN
        server.faults.clear()
    publish()
    assert text().startswith("All my own.\n\n" + diloco.BEGIN) and text().count("swarm:") == 2
    assert f"Outer step {master.state.outer_step}" in text(), "it is tried again"
    assert diloco.CURVE not in text() and "matplotlib" in log[-1]


def test_two_workers_with_one_node_id(folder):
    master = make_master(folder)
    old, new = Node(folder), Node(folder)
    old.send(3)
    master.sync_once()
    new.send(2)
    master.sync_once()
    old.node.take_results(old)
    old.send(4)
    master.sync_once()
    entry = master.state.nodes["a"]
    assert (entry.steps, entry.lost) == (5, 4) and "taken over" in entry.refused[-1]["reason"]
    old.see()
    assert (old.stop_signal == "Refused"
            and "another worker has taken over the node id a" in str(old.node.failed))
    newest = Node(folder)
    newest.send(2)
    old.step, old.node.uploading = newest.step - 5, None
    old.send(5)
    assert isinstance(old.node.uploading[1].error, diloco.Refused)


@pytest.mark.parametrize("first", ["original", "copy"])
def test_a_copied_run_folder_goes_on_once(folder, first):
    """Both processes have one lineage and train at the same pace: the one that began later goes
    on, the other stops and says so, whoever sends first."""
    master = make_master(folder, **PLAIN)
    original = Node(folder, inner_steps=5)
    exchange(master, original, steps=5)
    copied = Node(folder, saved=original.save(), inner_steps=5)
    pair = [original, copied] if first == "original" else [copied, original]
    for _ in range(12):
        for node in [node for node in pair if not node.stop_signal]:
            node.train()
            node.node.after_step(node)
            node.upload()
            node.node.take_results(node)
        master.sync_once()
        for node in [node for node in pair if not node.stop_signal]:
            node.see()
    assert original.stop_signal == "Refused" and not copied.stop_signal
    assert "began later" in str(original.node.failed)
    exchange(master, copied)
    entry = master.state.nodes["a"]
    assert entry.incarnation == copied.node.me.incarnation
    assert entry.local_step == copied.step and entry.steps + entry.lost >= copied.step
    assert same(copied.weights(), master.weights)


def test_a_worker_with_an_empty_disk_overwrites_nothing_that_waits(folder):
    master = make_master(folder, **PLAIN)
    Node(folder).send(5)
    second = Node(folder)
    assert second.step == 5 and second.position == 10, "it joins where the other had come to"
    second.send(4)
    assert master.sync_once() == 1 and counts(master) == (9, 9, 0)


def test_a_checkpoint_of_another_version_is_named(folder):
    make_master(folder)
    a = Node(folder)
    a.send(1)
    for other in (lambda node: node.pop("sent"), lambda node: node.pop("lineage"),
                  lambda node: node["sent"].update(more=1),
                  lambda node: node.update(unconfirmed={"steps": 1})):
        saved = copy.deepcopy(a.save())
        other(saved["coordinator"])
        with pytest.raises(ValueError, match="of another version"):
            Node(folder, saved=saved)


@pytest.mark.parametrize("seen", ["sent", "merged"])
def test_an_upload_that_outlives_its_process_is_taken_for_what_it_is(folder, seen):
    """The commit of a killed worker may still land after the worker was started again; the new one
    meets it when it sends, or only once it is merged."""
    master, a = make_master(folder, **PLAIN), Node(folder)
    a.train(2)
    saved = a.save()
    a.train(2)
    a.node.push(a)
    late, again = a.node.uploading[1], Node(folder, saved=saved)
    if seen == "sent":
        again.train(2)          # other steps than the first time: other bytes
        late.run()
        again.send()
        again.node.take_results(again)
        master.sync_once()
    else:
        again.train(3)
        late.run()
        master.sync_once()
    again.see()
    exchange(master, again)
    assert counts(master) == ((5, 5, 0) if seen == "sent" else (6, 5, 1))
    assert same(again.weights(), master.weights)


def test_the_newer_of_two_workers_waits_until_the_older_ones_file_is_gone(folder, monkeypatch):
    master, old, new = make_master(folder), Node(folder), Node(folder)
    old.send(4)
    new.train(4)
    new.node.push(new)
    monkeypatch.setattr(diloco, "wait", lambda *_: master.sync_once())
    new.upload()
    new.node.take_results(new)
    assert [e for e, _ in new.events] == ["join", "hub_error", "push"]
    master.sync_once()
    assert master.state.nodes["a"].steps == 8


def test_a_slow_node_is_not_shut_out_by_the_commit_limit(folder):
    folder.limited = True
    settings = dict(commits_per_hour=100_000, inner_steps=1)
    master = make_master(folder, **settings)
    slow, fast = Node(folder, "slow", **settings), Node(folder, "fast", **settings)
    slow.send(1)
    for _ in range(6):          # until the slow one is no longer active
        exchange(master, fast)
    assert master.active() == {"fast"}
    slow.see()
    slow.send(1)
    master.sync_once()
    assert master.state.nodes["slow"].steps == 2


def test_a_clock_that_is_ahead_stops_nobody_and_gives_nobody_more(folder):
    folder.limited, now = True, time.time()
    state = diloco.SwarmState("run")
    assert diloco.may_commit({"commits_per_hour": 100}, folder, state, [now + 86400])
    assert not diloco.may_commit({"commits_per_hour": 2}, folder, state, [now - 1])
    assert diloco.may_commit({"commits_per_hour": 2}, folder, state, [now - 3600])
    state = diloco.SwarmState("run", published=1e9, nodes={
        name: diloco.NodeState(last_seen=1e9 - 60) for name in "abcdefgh"})

    def share():
        times = []
        while diloco.may_commit({"commits_per_hour": 100}, folder, state, times, last=True):
            times.append(now)
        return len(times)
    assert share() == 10
    state.nodes["a"].last_seen += 86400
    assert share() == 10
    state.nodes["a"].last_seen -= 2 * 86400
    assert share() == 11
    folder.limited = False
    master, ahead = make_master(folder), Node(folder)
    ahead.node.me = diloco.Identity("a", *["9" + ahead.node.me.incarnation[1:]] * 2)
    ahead.send(1)
    master.sync_once()
    again = Node(folder)        # on an empty disk, with the right time
    exchange(master, again)
    assert not again.node.failed and master.state.nodes["a"].steps == 2


def test_state_that_is_none_is_refused_and_never_overwritten(hub, remote):
    exchange(make_master(remote), Node(remote))
    # as a cache may say for a moment
    hub.fault("GET", "step_count", 404, count=1, X_Error_Code="EntryNotFound")
    assert make_master(remote).state.outer_step == 1
    good = json.loads(remote.read(diloco.STEP)[1])
    bad = [{"nodes": {"a": 5}}, {"outer_step": 10 ** 30}, {"outer_step": 5}, {"files": {"x": 1}},
           {"momentum": 1.5}, {"nodes": {"a": {"steps": "many"}}}]
    for content in [b"", b"[" * 100_000, b"5", *(json.dumps(good | b).encode() for b in bad)]:
        with pytest.raises(diloco.Refused, match="put back a version"):
            diloco.parse_state(content)
    assert diloco.parse_state(json.dumps({**good, "nodes": {"a": {}}}).encode())


def test_a_cache_that_lags_is_not_taken_for_another_master(folder, monkeypatch):
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    master, a = make_master(folder), Node(folder)
    exchange(master, a)
    old_head, old_read, old = folder.head(), folder.read(diloco.STEP), [False, True]
    exchange(master, a)

    class Lagging(diloco.FolderTransport):
        def head(self):
            return old_head if old.pop() else super().head()

        def read(self, path, version=None):
            return old_read if version == old_head[0] else super().read(path, version)
    master.repository.transport = Lagging(folder.root)
    a.send(1)
    assert master.sync_once() == 3
    assert any("older version" in line for line in master.lines)


def test_the_status_table_only_reads(folder):
    with pytest.raises(diloco.Refused, match="no global model"):
        diloco.status(folder)
    assert not folder.root.exists()
    master = make_master(folder)
    a, b = Node(folder, "a"), Node(folder, "b")
    for i in range(30):
        if i == 29:
            b.send(1)
            folder.commit({f"nodes/b/delta_{b.step}.safetensors": b"damaged"})
        exchange(master, a, *[b] * (i < 6))
    before = folder.head()
    lines = diloco.status(folder).splitlines()
    assert folder.head() == before
    assert lines[0].startswith(f"run {master.state.run_id} | outer step 30 | step 30 | 2 nodes")
    rows = {line.split()[0]: line.split() for line in lines if line[:1].isalpha()}
    assert rows["a"][3:6] == ["30", "30", "0"] and rows["b"][3:6] == ["6", "6", "0"]
    assert rows["b"][-1] == "1" and "unreadable" in "".join(lines)
    rounds = [line.split() for line in lines[lines.index("", 2) + 2:]]
    assert len(rounds) <= 20 and rounds[-1][0] == "30" and rounds[-1][-1] == "a"


def test_a_full_disk_is_waited_out(folder, monkeypatch):
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    master, a, real, full = make_master(folder), Node(folder), diloco.save_file, [2]

    def save_file(*args, **kwargs):
        full[0] -= 1
        if full[0] >= 0:
            raise SafetensorError("IoError(Os { code: 28, message: 'No space left on device' })")
        real(*args, **kwargs)
    monkeypatch.setattr(diloco, "save_file", save_file)
    a.send(1)
    a.node.take_results(a)
    assert [e for e, _ in a.events] == ["join", "hub_error", "hub_error", "push"]
    full[0] = 2
    assert master.sync_once() == 1 and sum("No space" in line for line in master.lines) == 2


def damage(folder, path, content):
    """Replace a file, or delete it (None)."""
    folder.commit({path: content} if content is not None else {},
                  [path] if content is None else [])


def test_what_is_lost_or_damaged_is_mended_by_the_master_that_runs(folder):
    master, a = make_master(folder), Node(folder)
    assert exchange(master, a) == 1
    damage(folder, diloco.WEIGHTS, b"of another version")
    at, state = diloco.read_state(folder)
    with pytest.raises(diloco.Unavailable, match="latest"):
        diloco.fetch_global(folder, at, state, a.node.folder, a.node.local.shapes)
    assert exchange(master, a) == 2, "the master that holds the weights publishes a keyframe"
    assert any("latest.safetensors was damaged" in line for line in master.lines)
    state, weights = diloco.load_global(folder)
    assert state.keyframe == 2 and same(weights, master.weights)
    damage(folder, diloco.MOMENTUM, None)
    assert exchange(master, a) == 3 and master.state.keyframe == 3
    for i, bad in enumerate((b"{}", b"", None)):
        damage(folder, diloco.STEP, bad)
        assert exchange(master, a) == 4 + i
        assert diloco.parse_state(folder.read(diloco.STEP)[1]).outer_step == 4 + i
    late, replaced = Node(folder, "late").node.local, make_master(folder)
    for one in (late.G, a.node.local.G, replaced.weights):
        assert same(one, master.weights)
    for one in (late.momentum, a.node.local.momentum, replaced.momentum):
        assert same(one, master.momentum)


@pytest.mark.parametrize("path", [diloco.STEP, diloco.WEIGHTS, diloco.MOMENTUM])
def test_a_new_master_never_writes_over_a_model(folder, monkeypatch, path):
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    make_master(folder)
    for bad in (b"", b"{}", None):
        damage(folder, path, bad)
        before = folder.head()
        with pytest.raises(diloco.Refused, match=f"{Path(path).name}.* put"):
            make_master(folder)
        assert folder.head() == before


def delta_file(path, tensors=None, **header):
    tensors = tensors or {k: torch.ones_like(v) for k, v in diloco.swarm_tensors(Net()).items()}
    meta = dict(run_id="?", node_id="bad", incarnation="1", local_step="5", base_outer_step="0",
                steps="5", tokens="1", loss="1.0", codec="fp32") | header
    save_file(tensors, path, metadata={k: str(v) for k, v in meta.items()})
    return path.read_bytes()


def bad_deltas(tmp_path, run_id):
    good = {k: torch.ones_like(v) for k, v in diloco.swarm_tensors(Net()).items()}
    count = iter(range(10, 99))

    def make(tensors=None, **header):
        return delta_file(tmp_path / "x", tensors,
                          **{"run_id": run_id, "incarnation": next(count), **header})
    inf, nan = ({**good, "b": torch.full((5,), float(v))} for v in ("inf", "nan"))
    return {
        "not finite": [make(inf), make(nan)],
        "tensor": [make({"w": good["w"]}), make({**good, "b": torch.ones(6)}),
                   make({**good, "extra": torch.ones(1)})],
        "another run": [make(run_id="0000")],
        "header says": [make(node_id="other"), make(local_step=6)],
        "unreadable": [make()[:-9]],
        "no safetensors file": [b"hello", struct.pack("<Q", 1 << 30) + b"{}" * 50, b""],
        "which does not exist": [make(base_outer_step=99)],
        "lacks something": [make(codec="zip"), make(steps="many"), make(steps=-1),
                            make(tokens="9" * 4300), make(loss="nan"), make(incarnation="1" * 100),
                            delta_file(tmp_path / "x", None).replace(b'"run_id"', b'"xun_id"')],
        "more than this model can need": [b"0" * (1 << 21)],
    }


def test_bad_deltas_are_refused_by_name_and_the_round_goes_on(folder, tmp_path):
    master, a = make_master(folder), Node(folder)
    for reason, contents in bad_deltas(tmp_path, master.state.run_id).items():
        for content in contents:
            folder.commit({"nodes/bad/delta_5.safetensors": content, "nodes/what.txt": b"?"})
            before = master.state.outer_step
            assert exchange(master, a) == before + 1, reason
            line = json.loads(master.history.splitlines()[-1])
            (refused,) = line["refused"]
            assert refused["path"] == "nodes/bad/delta_5.safetensors", refused
            assert reason in refused["reason"] and line["strange"] == 1
            assert [m["node"] for m in line["merged"]] == ["a"]
            assert all(v.isfinite().all() for v in master.weights.values())
            assert folder.list("nodes/") == []
    me, weights = a.node.me, {k: v.clone() for k, v in master.weights.items()}
    replay = delta_file(tmp_path / "x", run_id=master.state.run_id, node_id="a", local_step=1,
                        steps=1, lineage=me.lineage, incarnation=me.incarnation)
    folder.commit({"nodes/a/delta_1.safetensors": replay})
    master.sync_once()
    assert "replay" in master.lines[-1] and same(master.weights, weights)
    assert set(master.state.nodes) == {"a", "bad"}, "only well-formed deltas make an entry"


def test_files_that_are_no_deltas_and_nodes_that_are_gone_leave_the_state_small(folder):
    master, a = make_master(folder), Node(folder)
    folder.commit({f"nodes/junk{i}/x{i}": b"?" for i in range(250)})
    folder.commit({f"nodes/junk{i}/delta_1.safetensors": b"?" for i in range(50)})
    for _ in range(4):
        exchange(master, a)
    assert folder.list("nodes/") == [] and master.state.strange == 250
    assert set(master.state.nodes) == {"a"}
    b, c = Node(folder, "b"), Node(folder, "c")
    exchange(master, b, c, steps=3)
    master.state.nodes["b"].last_seen -= 30 * 86400
    master.state.nodes["c"].last_seen += 30 * 86400     # a clock that was ahead
    for _ in range(2):
        exchange(master, a)
    assert set(master.state.nodes) == set("ac") and master.state.former["steps"] == 3
    assert master.state.nodes["c"].last_seen <= time.time()
    c.send(2)
    assert "1 that left" in diloco.status(folder)
    assert [r["outer_step"] for r in history_of(folder)] == list(range(1, 8))
    assert len([path for path, _, _ in folder.list("global/") if "history" in path]) == 3


@pytest.mark.parametrize("restarted", [False, True])
def test_a_node_that_comes_back_after_it_left_the_state_goes_on(folder, restarted):
    master = make_master(folder, **PLAIN)
    a, b = Node(folder), Node(folder, "b")
    exchange(master, a, b, steps=4)
    saved = b.save()
    master.state.nodes["b"].last_seen -= 30 * 86400
    exchange(master, a)
    assert set(master.state.nodes) == {"a"}
    b = Node(folder, "b", saved=saved) if restarted else b
    b.see()
    exchange(master, b, steps=3)
    assert counts(master, "b") == (7, 3, 0)


def test_the_refused_worker_is_told_and_goes_on_from_the_global(folder):
    master, a = make_master(folder, **PLAIN), Node(folder)
    exchange(master, a)
    a.send(3)
    folder.commit({"nodes/a/delta_4.safetensors": b"damaged"})
    a.node.take_results(a)
    a.train(2)
    assert master.sync_once() == 1
    a.see()
    assert "unreadable" in dict(a.events)["refused"]["reason"] and not a.node.local.in_flight
    assert exchange(master, a, steps=0) == 2 and counts(master) == (6, 3, 3)
    with torch.no_grad():
        a.model.w[0, 0] = float("nan")
    a.step += 1
    a.send()
    assert a.stop_signal == "Refused" and "not finite" in str(a.node.failed)


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "x" * 65, "a b", "é"])
def test_node_ids_are_path_safe(folder, name):
    with pytest.raises(ValueError, match="node_id"):
        diloco.DumbDiLoCo(folder, name, SWARM)
    with pytest.raises(diloco.Refused, match="no path"):
        folder.commit({"nodes/../../evil": b""})


def test_no_node_decides_by_the_size_of_its_deltas(folder):
    """An outsized delta is scaled down to ten medians of the NODES' norms, a first one to the norm
    of the global weights."""
    weights = {k: torch.ones_like(v) for k, v in diloco.swarm_tensors(Net()).items()}
    settings, log = {**SWARM, **PLAIN, "max_norm_ratio": 10.0, "inner_steps": 1}, []
    master = diloco.MasterOuterLoop(folder, settings, weights, {"buffers": ["stat"]},
                                    log=log.append)

    def moved(*nodes):
        before = {k: v.clone() for k, v in master.weights.items()}
        for node, scale in nodes:
            node.send(1, size=scale)
        exchange(master, *[node for node, _ in nodes], steps=0)
        return math.sqrt(sum(float((v - before[k]).pow(2).sum())
                             for k, v in master.weights.items()))
    a = Node(folder)
    size = math.sqrt(sum(v.numel() for v in weights.values()))
    assert moved((a, 1e15)) == pytest.approx(size, rel=1e-3)
    for _ in range(3):
        moved((a, 1e-3))
    assert master.state.nodes["a"].norm < 1
    assert moved((a, 1e15)) < 10.1 * master.state.nodes["a"].norm
    b, c = Node(folder, "b"), Node(folder, "c")
    moved((a, 1e-3), (b, 1e-3), (c, 1e-3))
    for _ in range(3):      # one of three sends what it likes, for as long as it likes
        usual = master.state.nodes["a"].norm
        assert moved((a, 1e-3), (b, 1e-3), (c, 1e15)) < 5 * usual
    assert sum("node c sends deltas far above" in line for line in log) == 1


def test_a_whole_loop_after_a_short_one_is_not_outsized(folder):
    weights = {k: torch.full_like(v, 1e3) for k, v in diloco.swarm_tensors(Net()).items()}
    master = diloco.MasterOuterLoop(folder, {**SWARM, "max_norm_ratio": 10.0, "inner_steps": 20},
                                    weights, {}, log=(log := []).append)
    a = Node(folder)
    exchange(master, a)
    exchange(master, a, steps=20, size=1.0)
    exchange(master, a, steps=1, size=100.0)
    small, large, huge = [line["merged"][0]["norm"] for line in history_of(folder)]
    assert 15 * small < large and huge == pytest.approx(10 * large, rel=1e-3)
    assert sum("node a sends deltas far above" in line for line in log) == 1


def test_a_node_whose_loss_stays_far_above_is_left_out_and_starts_again(folder):
    master = make_master(folder)
    a, b = Node(folder), Node(folder, "b")
    a.last_loss, b.last_loss = torch.tensor(2.0), torch.tensor(3.0)
    for i in range(6):
        exchange(master, a, b)
    assert counts(master) == (6, 6, 0) and counts(master, "b") == (6, 3, 3)
    reasons = [payload["reason"] for event, payload in b.events if event == "refused"]
    assert len(reasons) == 3 and "stays far above" in reasons[0]
    assert any("refused  nodes/b/" in line and "3.000" in line for line in master.lines)
    assert same(b.weights(), b.node.local.G)
    assert b.node.lr_scale(b.step) < 0.2, "it begins with small steps"
    b.last_loss = torch.tensor(2.0)
    for i in range(2):
        exchange(master, b)
    assert counts(master, "b") == (8, 5, 3)
    c = Node(folder, "c")
    for i in range(8):          # far above, too, but its loss falls: it only lags behind
        a.last_loss, c.last_loss = (torch.tensor(0.9 ** i * loss) for loss in (2.0, 4.0))
        exchange(master, a, c)
    assert counts(master, "c")[1:] == (8, 0)


def test_a_step_beyond_the_end_is_refused(folder, tmp_path):
    master = make_master(folder, inner_steps=10, config={"run": {"max_steps": 100}})
    for step, refused in ((10 ** 12 - 1, True), (211, True), (210, False)):
        content = delta_file(tmp_path / "x", run_id=master.state.run_id, local_step=step,
                             steps=1, first_step=step - 1)
        folder.commit({f"nodes/bad/delta_{step}.safetensors": content})
        master.sync_once()
        assert ("beyond the end of the run" in master.lines[-1]) == refused
    assert Node(folder, "late").step == 210 == master.state.progress


@pytest.mark.parametrize("topics, momentum, rounds", [
    ([], 0.8, [[("a", 50, 0)]]),
    (["short"], 0.9, [[("a", 5, 0)]]), (["stale"], 0.8, [[("a", 5, 3)]] * 5),
    ([], 0.8, [[("a", 5, 3)]] * 2 + [[("a", 5, 0)]] * 3),
    ([], 0.8, [[("a", 20, 0)]] * 4), (["long"], 0.8, [[("a", 20, 0)]] * 5),
    ([], 0.8, [[("a", 5, 0)], [("a", 99, 0)], [("a", 99, 0)], *[[("a", 5, 0)]] * 2]),
    (["large"], 0.8, [[("a", 9, 0)]] * 3 + [[("b", 5, 0)], [("c", 5, 0)]])])
def test_settings_that_hurt_are_told(topics, momentum, rounds):
    """The deltas of a round: (node, steps, outer steps late)."""
    lines = [{"outer_step": 10 + i, "merged": [
        {"node": node, "steps": steps, "tokens": steps, "base_outer_step": 9 + i - late}
        for node, steps, late in deltas]} for i, deltas in enumerate(rounds)]
    advice = dict(diloco.advice({"inner_steps": 5, "outer_momentum": momentum}, lines))
    assert list(advice) == topics and all("raise --" in text or "larger --" in text
                                          for text in advice.values())


def test_rounds_close_when_all_are_there_or_the_time_is_up(folder, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(diloco.time, "monotonic", lambda: now[0])
    master = make_master(folder, round_timeout=60.0)
    master.state.nodes = {n: diloco.NodeState(outer_step=step)
                          for n, step in (("a", 9), ("b", 8), ("c", 3))}
    master.state.outer_step = 9
    assert master.active() == {"a", "b"}
    assert (not master.due(set()) and not master.due({"a"}) and master.due({"a", "b"})
            and master.due({"a", "b", "d"}))
    now[0] = 59.0
    assert not master.due({"a"})
    now[0] = 61.0
    assert master.due({"a"})
    master.settings["round_timeout"] = 0.0      # one node's pause is not everybody's
    master.state.nodes["a"].seconds, master.state.nodes["b"].seconds = 5.0, 3600.0
    assert master.round_timeout() == 10.0


def test_the_memory_of_a_round_does_not_grow_with_the_nodes(folder, tmp_path):
    weights = {"w": torch.zeros(1000, 1000)}
    master = diloco.MasterOuterLoop(folder, SWARM, weights, {}, log=lambda line: None)

    def anonymous():    # MB; mapped files do not count: they can be dropped and read again
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1024

    def peak(nodes, step):
        for i in range(nodes):
            folder.commit({f"nodes/n{i}/delta_{step}.safetensors": delta_file(
                tmp_path / "x", weights, run_id=master.state.run_id, node_id=f"n{i}",
                local_step=step, steps=1)})
        most, done = [], threading.Event()

        def watch():
            while not done.wait(0.001):
                most.append(anonymous())
        watcher = threading.Thread(target=watch)
        watcher.start()
        master.sync_once()
        done.set()
        watcher.join()
        return max(most)
    few = peak(2, 1)
    assert peak(40, 2) - few < 60 and len(master.state.nodes) == 40, "the 40 deltas are 160 MB"


# ---- diloco.py: alone
# - a copied file is whole: it has defaults, and says what a trainer lacks
# - tensors of any layout; pieces are coded like the whole


def test_the_defaults_in_the_file_are_those_of_the_config():
    assert diloco.DEFAULTS == config_module.base["distributed"]
    with pytest.raises(ValueError, match="distributed.inner_step is not a setting; .* inner_steps"):
        diloco.complete({"inner_step": 5})
    for bad in ({"codec": "int3"}, {"inner_steps": 0}, {"outer_lr": 0.0}, {"outer_momentum": 1.0},
                {"inner_steps": "5"}, {"round_timeout": -1.0}, {"round_timeout": math.nan},
                {"keyframe_every": 0}, {"wait": 1}):
        with pytest.raises(ValueError, match=f"distributed.{next(iter(bad))}="):
            diloco.complete(bad)


def test_what_a_trainer_lacks_is_one_line(folder):
    node = diloco.DumbDiLoCo(folder, "a")
    with pytest.raises(ValueError, match="the trainer has no tokens, last_loss, .*TrainerProtocol"):
        node.start(types.SimpleNamespace(model=Net(), step=0, position=0))
    trainer = diloco.PlainTrainer(Net(), 10)
    trainer.config = {"run": {}}
    with pytest.raises(ValueError, match="no run.max_steps"):
        node.start(trainer)


def test_parameters_of_any_memory_layout(folder, monkeypatch):
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(16, 64, 3).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(32, 80).t())
            self.scalar = nn.Parameter(torch.tensor(1.0))
    torch.manual_seed(0)
    first = Strided()
    assert not first.turned.is_contiguous() and not first.conv.weight.is_contiguous()
    master = diloco.MasterOuterLoop(folder, {**SWARM, "codec": "int4"},
                                    diloco.swarm_tensors(first), {}, log=lambda line: None)
    monkeypatch.setattr(Node, "make", Strided)
    node = Node(folder, codec="int4")
    assert exchange(master, node, size=0.1) == 1 and same(node.node.local.G, master.weights)
    assert not node.model.turned.is_contiguous(), "it stays as the model made it"


def test_pieces_of_a_tensor_are_coded_like_the_whole(monkeypatch):
    torch.manual_seed(0)
    tensors = {"a": torch.randn(1000, 7), "b": torch.randn(300, 3, 5), "c": torch.randn(999),
               "d": torch.randn(()), "e": torch.randn(5, 4000)}
    shapes = diloco.shapes_of(tensors)
    for codec in diloco.CODECS:
        whole = diloco.encode(tensors, codec)
        monkeypatch.setattr(diloco, "PIECE", 500)
        cut = diloco.encode(tensors, codec)
        assert len(list(diloco.pieces(shapes))) > 20
        assert all(torch.equal(cut[k], v) for k, v in whole.items())
        wanted = diloco.decode(whole, shapes)
        for name, rows in diloco.pieces(shapes):
            piece = diloco.decode_piece(whole, name, rows, shapes[name])
            assert torch.equal(piece, wanted[name][rows])
        monkeypatch.undo()


# ---- diloco.py: a folder as a repository
# - a commit that is killed anywhere is made or not, and whoever comes next sees one version whole
# - what people do to the visible files counts as a commit; what stands in a file's way is put aside
# - no link is followed, and no name read from the disk leads out of the folder
# - with a damaged index, without hard links or the right to write: it goes on
# - processes that write at once lose nothing; a full disk leaves the version before

STEPS = ["replace", "unlink", "fsync", "link", "rename", "mkdir", "scandir", "lstat"]


def shown(root):
    """{path: content} of what people see in a folder."""
    return {f.relative_to(root).as_posix(): f.read_bytes() for f in sorted(root.rglob("*"))
            if f.is_file() and ".hub" not in f.relative_to(root).parts}


def paths(hub, prefix=""):
    return [path for path, _, _ in hub.list(prefix)]


def test_a_commit_killed_anywhere_is_made_or_not(tmp_path, monkeypatch):
    """From the n-th of these calls on, nothing is done. Nothing is left over, and nothing of the
    killed commit is taken for a change by hand."""
    old = {"a": b"old", "nodes/x/b": b"old", "nodes/x/gone": b"gone", "twin": b"old"}
    new = {"a": b"new", "nodes/x/b": b"new", "nodes/y/c": b"more", "twin": b"old"}
    file, left = tmp_path / "more", 0
    file.write_bytes(b"more")

    def mortal(real):
        def dies(*args, **kwargs):
            nonlocal left
            left -= 1
            if left <= 0:
                raise Stop
            return real(*args, **kwargs)
        return dies
    seen = set()
    for n in itertools.count(1):
        root = tmp_path / str(n)
        hub = diloco.FolderTransport(root)
        hub.commit(old)
        left = n
        with monkeypatch.context() as m, contextlib.suppress(Stop):
            for call in STEPS:
                m.setattr(os, call, mortal(getattr(os, call)))
            hub.commit({"a": b"new", "nodes/x/b": b"new", "nodes/y/c": file}, ["nodes/x/gone"])
        again = diloco.FolderTransport(root)
        version, _ = again.read("a")
        seen.add(version)
        want = {"1": old, "2": new}[version]
        assert all(again.read(path) == (version, content) for path, content in want.items())
        assert paths(again) == sorted(want) and shown(root) == want
        assert again.commit({"d": b"next"}, expect=version) == str(int(version) + 1)
        assert shown(root) == {**want, "d": b"next"}
        assert sorted(os.listdir(root / ".hub")) == ["index.json", "lock", "objects"]
        assert len(os.listdir(root / ".hub/objects")) == len({*want.values(), b"next"})
        if left > 0:
            break
    assert seen == {"1", "2"} and n > 50


def test_what_people_do_to_the_files_of_a_folder_counts(folder, tmp_path):
    root = folder.root
    folder.commit({"README.md": b"page", "global/step_count.json": b"{}", "nodes/a/x": b"x",
                   "model.safetensors": b"weights"})
    (root / "README.md").write_text("my own page")          # in place, as some editors do
    assert folder.read("README.md") == ("2", b"my own page")
    (root / "nodes/b").mkdir()
    (tmp_path / "put").write_bytes(b"by hand")
    os.replace(tmp_path / "put", root / "nodes/b/delta_1.safetensors")
    (root / "nodes/a/x").unlink()
    ((path, size, tag),) = folder.list("nodes")
    assert (path, size) == ("nodes/b/delta_1.safetensors", 7)
    folder.fetch(path, None, tmp_path / "to", tag)
    assert (tmp_path / "to").read_bytes() == b"by hand"
    with pytest.raises(diloco.Conflict):
        folder.commit({"y": b""}, expect="2")
    head = folder.head()
    (root / "global/step_count.json").unlink()
    assert folder.head()[0] > head[0] and folder.head()[1] == "" and not folder.read(diloco.STEP)[1]
    # touched or copied is not changed: the version stays
    version, _ = folder.head()
    os.utime(root / "README.md", ns=(1, 1))
    (tmp_path / "copy").write_bytes((root / "model.safetensors").read_bytes())
    os.replace(tmp_path / "copy", root / "model.safetensors")
    assert folder.read("README.md") == (version, b"my own page")
    # other files beside are none of the hub's: it may be given a folder that holds more
    (root / "more").mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "more/notes.txt").write_text("mine")
    assert paths(folder) == ["README.md", "model.safetensors", path]
    assert folder.commit({}, ["model.safetensors"], expect=version) == str(int(version) + 1)
    assert sorted(shown(root)) == ["README.md", "more/notes.txt", path, "notes.txt"]
    # a damaged object: as long as nobody could notice it by size and time, its hash tells
    status = (root / path).stat()
    (root / path).write_bytes(b"by HAND")
    os.utime(root / path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(diloco.Refused, match="is damaged"):
        folder.read(path)
    with pytest.raises(diloco.Unavailable, match="is not what"):
        folder.fetch(path, None, tmp_path / "damaged", tag)
    assert not (tmp_path / "damaged").exists()


def test_a_file_system_without_hard_links_gets_copies(folder, tmp_path, monkeypatch):
    def link(*args, **kwargs):
        raise OSError(95, "Operation not supported")
    file, hashed = tmp_path / "file", []
    file.write_bytes(b"weights")
    files = {diloco.WEIGHTS: b"weights", diloco.MODEL: b"weights", diloco.STEP: b"{}"}
    with monkeypatch.context() as m:
        m.setattr(os, "link", link)
        folder.commit({diloco.WEIGHTS: file, diloco.MODEL: file, diloco.STEP: b"{}"})
        assert shown(folder.root) == files
        m.setattr(diloco, "sha256", hashed.append)
        assert folder.read(diloco.STEP) == ("1", b"{}") and paths(folder) and not hashed
    (folder.root / diloco.MODEL).write_bytes(b"mine")
    ((_, size, tag), *_), version = folder.list("global/"), folder.head()[0]
    folder.fetch(diloco.WEIGHTS, version, tmp_path / "to", tag)
    assert folder.read(diloco.MODEL) == ("2", b"mine") and size == 7 and version == "2"
    assert (tmp_path / "to").read_bytes() == b"weights"


BAD_PATHS = ["../victim", "/etc/hostname", "nodes/../../victim", "C:/victim", "nodes\\..\\victim",
             ".hub/lock", ".HUB/lock", "nodes//x", "./x", "nodes/..", "", "a\nb", "x" * 300,
             "nodes/x. /y"]
ENTRY = {"sha256": hashlib.sha256(b"evil").hexdigest(), "size": 4, "mtime": 1.0}


@pytest.mark.parametrize("bad", [
    b"", b"{", b"[]", b"5", b"[" * 100_000, b"\xff", b"null", {"version": -1}, {"version": "1"},
    {"version": 1.5}, {"files": {"a": 1}}, {"stale": [5]},
    *[{"files": {"a": {**ENTRY, **wrong}}} for wrong in (
        {"sha256": "../../victim"}, {"sha256": 5}, {"mtime": None})],
    *[{"files": {path: ENTRY}} for path in BAD_PATHS], *[{"stale": [path]} for path in BAD_PATHS]])
def test_a_bad_index_is_made_again_from_the_files_that_are_there(folder, capsys, tmp_path, bad):
    """Also one that names something outside the folder: nothing there is touched."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder.commit({diloco.STEP: b"{}", "nodes/a/x": b"1", "config.json": b"2"})
    before = shown(folder.root)
    (folder.root / ".hub/index.json").write_bytes(
        bad if isinstance(bad, bytes) else json.dumps({"version": 1, **bad}).encode())
    again = diloco.FolderTransport(folder.root)
    assert again.read(diloco.STEP)[1] == b"{}" and "cannot be read" in capsys.readouterr().out
    assert paths(again, "nodes/") == ["nodes/a/x"]
    version, _ = again.head()
    assert again.commit({"config.json": b"3"}, expect=version) == str(int(version) + 1)
    assert shown(folder.root) == {**before, "config.json": b"3"}
    assert victim.read_text() == "precious"


def test_no_path_leads_out_of_the_folder(folder, tmp_path):
    for bad in BAD_PATHS:
        for add, delete in ({bad: b""}, ()), ({f"{bad}/x": b""}, ()), ({}, [bad]):
            with pytest.raises(diloco.Refused, match="no path in the repository"):
                folder.commit(add, delete)
    folder.commit({diloco.STEP: b"{}"})
    for tag in ("../../../victim", str(tmp_path)):      # it comes from a file of somebody else
        with pytest.raises(diloco.Unavailable):
            folder.fetch(diloco.STEP, None, tmp_path / "to", tag)


def test_what_is_in_the_way_blocks_nobody(folder, capsys):
    root, path = folder.root, "nodes/a/delta_1.safetensors"
    (root / path).mkdir(parents=True)           # a folder named like a coming delta
    (root / path / "junk").write_text("junk")
    folder.commit({path: b"1"})
    assert folder.list("nodes/")[0][:2] == (path, 1) and (root / path).read_bytes() == b"1"
    assert capsys.readouterr().out.count("in the way") == 1
    folder.commit({}, [path])
    (root / "nodes/a").rmdir()
    (root / "nodes/a").write_text("a file where a folder has to be")
    folder.commit({path: b"2"})
    assert folder.read(path)[1] == b"2" == (root / path).read_bytes()
    assert paths(folder) == [path]


def test_links_are_not_followed_whatever_they_point_at(folder, tmp_path):
    outside, root, path = tmp_path / "outside", folder.root, "nodes/b/delta_1.safetensors"
    own = root / ".hub"
    outside.mkdir()
    (outside / "delta_1.safetensors").write_text("precious")
    (root / "nodes").mkdir(parents=True)
    (root / "nodes/b").symlink_to(outside)
    (root / "global").symlink_to(outside)
    (root / "README.md").symlink_to(outside / "delta_1.safetensors")
    assert folder.list("") == [] and folder.read("README.md")[1] is None
    for i in range(2):
        folder.commit({path: b"4", diloco.STEP: b"{}", "README.md": b"page"})
        folder.commit({}, [path, "README.md"])
    for name in ("index.json", "objects/" + hashlib.sha256(b"5").hexdigest()):
        victim = own / name
        victim.unlink(missing_ok=True)
        victim.symlink_to(outside / "delta_1.safetensors")
        assert folder.commit({"x": b"5"})
        victim.unlink(missing_ok=True)
        victim.mkdir()
        assert folder.commit({"x": b"5"}) and folder.read("x")[1] == b"5"
    (own / "index.json").unlink()
    os.mkfifo(own / "index.json")        # a reader of it would wait for ever
    (own / "objects/junk").mkdir()
    (own / "junk").symlink_to(outside)
    assert folder.commit({"x": b"6"}) and folder.read("x")[1] == b"6"
    assert [f.read_text() for f in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", [".hub", ".hub/objects", ".hub/lock"])
def test_a_folder_whose_inner_parts_are_links_or_of_another_kind_is_refused(folder, tmp_path, name):
    outside, place = tmp_path / "outside", folder.root / name
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    with pytest.raises(diloco.Refused, match="is a link"):
        folder.commit({"x": b"1"})
    assert not outside.exists()
    place.unlink()
    place.mkdir() if name == ".hub/lock" else place.write_text("a file")
    with pytest.raises(diloco.Refused) as e:
        folder.commit({"x": b"1"})
    assert str(place) in str(e.value) and "\n" not in str(e.value)
    hub = diloco.FolderTransport(tmp_path / "file")
    hub.root.write_text("no folder")
    for verb, *args in (("head",), ("list", ""), ("read", "x"), ("commit", {"x": b"1"})):
        with pytest.raises(diloco.Refused, match="file.*: (Not a directory|File exists)"):
            getattr(hub, verb)(*args)


def test_who_may_only_read_needs_no_lock_and_writes_nothing(folder, monkeypatch):
    folder.commit({diloco.STEP: b"{}", "nodes/a/x": b"1"})

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")
    with monkeypatch.context() as m:
        for call in ("replace", "unlink", "rename", "link", "mkdir"):
            m.setattr(os, call, refuse)
        m.setattr(diloco.FileLock, "acquire", refuse)
        version, tag = folder.head()
        assert folder.read(diloco.STEP) == (version, b"{}")
        assert folder.list("global/") == [(diloco.STEP, 2, tag)]
        with pytest.raises(diloco.Refused, match="Permission denied"):
            folder.commit({"x": b""})


def test_processes_that_write_to_one_folder_lose_nothing(tmp_path):
    code = f"""
import sys, diloco
hub = diloco.FolderTransport({str(tmp_path / 'hub')!r})
for i in range(20):
    while True:
        version, content = hub.read("count")
        try:
            hub.commit({{"count": str(int(content or 0) + 1).encode(),
                        f"nodes/{{sys.argv[1]}}/{{i}}": b"x"}}, expect=version)
            break
        except diloco.Conflict:
            pass
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name], cwd=HERE) for name in "ab"]
    hub = diloco.FolderTransport(tmp_path / "hub")
    while any(writer.poll() is None for writer in writers):
        version, content = hub.read("count")        # a reader between them sees whole versions
        assert int(content or 0) == int(version)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert hub.read("count") == ("40", b"40") and len(hub.list("nodes/")) == 40


def test_a_reader_reads_the_next_version_if_an_object_goes_meanwhile(folder, monkeypatch):
    folder.commit({"a": b"old"})
    other, real = diloco.FolderTransport(folder.root), diloco.is_file

    def and_then_it_goes(path):
        there = real(path)
        if there and folder.objects in Path(path).parents:
            monkeypatch.setattr(diloco, "is_file", real)
            other.commit({"a": b"new"})
        return there
    monkeypatch.setattr(diloco, "is_file", and_then_it_goes)
    assert folder.read("a") == ("2", b"new")


def test_a_full_disk_leaves_the_version_before(folder, monkeypatch):
    folder.commit({"a": b"old"})
    real = os.replace
    for what, made in ((".hub/objects", False), (".hub/index.json", False), ("b", True)):
        def replace(source, to):
            if to.relative_to(folder.root).as_posix().startswith(what):
                raise OSError(28, "No space left on device", str(to))
            real(source, to)
        with monkeypatch.context() as m, pytest.raises(diloco.Unavailable, match="No space"):
            m.setattr(os, "replace", replace)
            folder.commit({"a": b"new", "b": b"more"})
        # once the index is there the commit is made, and the next reader shows it
        assert folder.read("a") == (("2", b"new") if made else ("1", b"old"))
    assert shown(folder.root) == {"a": b"new", "b": b"more"}

# ---- diloco.py: codecs and updates
# - each codec has its size, and its error; vectors are exact; what is read is the same bits
# - what is rounded away comes back: odd shapes, zeros, numbers below fp16, one huge number
# - who follows the updates has the bits of who loads the model, and of a master that takes over


@pytest.mark.parametrize("codec, most, near", [("bf16", 2.01, 0.002), ("int8", 1.06, 0.007),
                                               ("int4", 0.57, 0.12), ("int2", 0.32, 0.36)])
def test_codecs_are_small_and_exact_to_read(tmp_path, codec, most, near):
    config = load_config(["--n-layer=8", "--d-model=320", "--n-head=5"])
    torch.manual_seed(0)
    delta = {k: torch.randn(v.shape) * 1e-4
             for k, v in build_model(config["model"]).named_parameters()}
    shapes, count = diloco.shapes_of(delta), sum(v.numel() for v in delta.values())
    stored = diloco.encode(delta, codec)
    file = tmp_path / "x"
    assert diloco.save(stored, file, {"codec": codec})["size"] / count <= most and count > 9e6
    _, mapped = diloco.open_coded(file, shapes)     # it has the tensors that a reader expects
    read, again = diloco.decode(mapped, shapes), diloco.decode(stored, shapes)
    assert all(torch.equal(read[k], again[k]) for k in delta)
    assert all(torch.equal(read[k], v) for k, v in delta.items() if v.dim() < 2)
    wrong = sum(float((read[k] - v).pow(2).sum()) for k, v in delta.items())
    assert wrong < near ** 2 * sum(float(v.pow(2).sum()) for v in delta.values())


@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
def test_codecs_at_the_edges(codec):
    torch.manual_seed(0)
    tensors = {"odd": torch.randn(7, 11), "zero": torch.zeros(8, 16),
               "tiny": torch.randn(8, 16) * 1e-20, "spike": torch.zeros(8, 8),
               "small": torch.randn(3, 3), "cube": torch.randn(4, 4, 5)}
    tensors["spike"][3, 3] = 1e6
    shapes = diloco.shapes_of(tensors)
    kept = {k: torch.zeros_like(v) for k, v in tensors.items()}
    total = {k: torch.zeros_like(v) for k, v in tensors.items()}
    for _ in range(50):         # the same tensors again and again, with error feedback
        wanted = {k: kept[k] + tensors[k] for k in tensors}
        said = diloco.decode(diloco.encode(wanted, codec), shapes)
        kept = {k: wanted[k] - said[k] for k in tensors}
        total = {k: total[k] + said[k] for k in tensors}
    for k, v in tensors.items():
        assert (total[k] / 50 - v).norm() <= 0.1 * v.norm(), k      # kept back, but bounded
    assert not total["zero"].any() and torch.allclose(total["small"] / 50, tensors["small"])


def same_model(model, master):
    """Whether a LocalModel, or another master, stands at the master's weights and momentum."""
    weights = getattr(model, "G", None) or model.weights
    return same(weights, master.weights) and same(model.momentum, master.momentum)


@pytest.mark.parametrize("codec", list(diloco.CODECS))
def test_following_the_updates_is_bit_identical_to_loading_the_model(tmp_path, codec):
    """Weights and momentum, through keyframes, partial rounds and changes of masters."""
    hub = diloco.FolderTransport(tmp_path / "hub")
    settings = dict(codec=codec, keyframe_every=5, outer_warmup=7)
    master = make_master(hub, **settings)
    a, b, late = (Node(hub, name, **settings) for name in ("a", "b", "late"))
    fetched = []
    real = hub.fetch
    hub.fetch = lambda path, *args: (fetched.append(path), real(path, *args))
    for i in range(12):
        for node in (a, b)[:1 + (i % 4 > 0)]:
            node.send(1, size=0.1)
        master.sync_once()
        a.see()
        if i % 3 == 2:
            b.see()
        loaded = Node(hub, "loaded", **settings)
        replaced = make_master(hub, **settings) if i % 5 == 3 else master
        assert all(same_model(x, master) for x in (a.node.local, loaded.node.local, replaced)), i
        master = replaced
    fetched.clear()
    late.see()
    b.see()
    assert same_model(b.node.local, master) and same_model(late.node.local, master)
    files = {path for path, _, _ in hub.list("global/")}
    # those since the keyframe before: who follows may be a few rounds behind
    assert {f for f in files if "update" in f} == {diloco.UPDATE.format(n) for n in range(6, 13)}
    assert {f for f in files if "history" in f} == {diloco.HISTORY.format(n) for n in (0, 5, 10)}
    assert fetched.count(diloco.WEIGHTS) == 1, "twelve rounds behind: by the keyframe"
    update = diloco.open_file(hub.root / diloco.UPDATE.format(12))[1]["w"].dtype
    assert update == {"fp32": torch.float32, "bf16": torch.bfloat16}.get(codec, torch.uint8)
    momentum = diloco.open_file(hub.root / diloco.MOMENTUM)[1]["w"].dtype
    assert momentum == (torch.float32 if codec == "fp32" else torch.bfloat16)


# ---- diloco.py: a swarm in virtual time
# - a swarm of real masters, workers and trainers is deterministic and loses nothing
# - it ends as one: by the nodes' mean progress, or by the outer steps; a longer run goes on
# - the loops of all nodes take the same time
# - settings of a master that is started again reach the nodes, and leave their own flags
# - a day under a commit limit: no hour has more commits, no node starves


class VirtualTime:
    """Stands in for `time` and `threading` in diloco.py: its threads run one at a time, in the
    order of a clock that only their sleeping moves. So a swarm of the real classes is
    deterministic, and a day takes seconds."""
    strftime, gmtime = staticmethod(time.strftime), staticmethod(time.gmtime)

    def __init__(self):
        self.now, self.count, self.heap, self.errors = 0.0, itertools.count(), [], []

    def monotonic(self):
        return self.now

    def time(self):
        return self.now

    def time_ns(self):
        return int(self.now * 1e9) + next(self.count)

    def sleep(self, seconds):
        turn = threading.Semaphore(0)
        heapq.heappush(self.heap, (self.now + seconds, next(self.count), turn))
        self.pass_on()
        turn.acquire()

    def pass_on(self):
        self.now, _, turn = heapq.heappop(self.heap)
        turn.release()

    def run(self, *works):
        """Run the works, and the threads they start, to their end."""
        for work in works:
            self.Thread(work).start()
        self.sleep(math.inf)
        if self.errors:
            raise self.errors[0]

    def Thread(self, target, args=(), daemon=None):
        turn, thread = threading.Semaphore(0), types.SimpleNamespace(alive=True)

        def body():
            turn.acquire()
            try:
                target(*args)
            except BaseException as e:
                self.errors.append(e)
            thread.alive = False
            self.pass_on()

        def start():
            heapq.heappush(self.heap, (self.now, next(self.count), turn))
            threading.Thread(target=body, daemon=True).start()

        def join(timeout=None):
            while thread.alive:
                self.sleep(1.0)
        thread.start, thread.join = start, join
        return thread


class Memory:
    """A repository in memory: FolderTransport's promises without a disk."""
    least_poll = 0.5

    def __init__(self, limited=False):
        self.files, self.number, self.commits, self.limited = {}, 0, [], limited

    def head(self):
        return str(self.number), hashlib.sha256(self.files.get(diloco.STEP, b"")).hexdigest()

    def read(self, path, version=None):
        return str(self.number), self.files.get(path)

    def fetch(self, path, version, to, tag=""):
        if path not in self.files:
            raise FileNotFoundError(path)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        to.write_bytes(self.files[path])

    def list(self, prefix, version=None):
        return [(p, len(c), "") for p, c in sorted(self.files.items()) if p.startswith(prefix)]

    def commit(self, add, delete=(), expect=None, message=""):
        if expect not in (None, str(self.number)):
            raise diloco.Conflict
        for path in delete:
            self.files.pop(path, None)
        self.files |= {p: c if isinstance(c, bytes) else Path(c).read_bytes()
                       for p, c in add.items()}
        self.number += 1
        self.commits.append(diloco.time.time())
        return str(self.number)

    def squash(self):
        pass


class Far:
    """What a node sees of a repository: far away, and some of its deltas are lost."""

    def __init__(self, transport, latency=0.0, loss=0.0, seed=0):
        self.transport, self.latency, self.loss = transport, latency, loss
        self.chance = random.Random(seed)

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def fetch(self, *args):
        self.transport.fetch(*args)
        diloco.time.sleep(self.latency)

    def commit(self, add, *args, **kwargs):
        diloco.time.sleep(self.latency)
        version = self.transport.commit(add, *args, **kwargs)
        if self.chance.random() < self.loss:
            self.transport.commit({}, list(add))
        return version


@contextlib.contextmanager
def virtual_time():
    clock, before = VirtualTime(), (diloco.time, diloco.threading, diloco.wait)
    diloco.time = diloco.threading = clock
    diloco.wait = lambda seconds, stopped: clock.sleep(seconds * random.uniform(0.8, 1.2))
    random.seed(0)              # the jitter
    try:
        yield clock
    finally:
        diloco.time, diloco.threading, diloco.wait = before


SPEEDS = [1.0, 0.83, 0.71, 0.55]     # of the study's nodes


def simulate(config, speeds, latency=0.0, loss=0.0, joins=(), log=None, seconds=math.inf):
    """A swarm of the real master, workers and trainers. A step takes a node 1 / speed seconds,
    latency is that of an upload and of a download, joins[i] when node i comes. After `seconds`
    the swarm is stopped as by Ctrl-C: what counts is the global model published by then.

    Returns (master, {node: trainer}).
    """
    trainers, left, hub = {}, set(range(len(speeds))), Memory()
    say = log or (lambda line: None)
    published = {"config": config_module.shared_settings(config)}
    with virtual_time() as clock, tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(config["run"]["seed"])
        first = diloco.swarm_tensors(build_model(config["model"]))
        master = diloco.MasterOuterLoop(hub, config["distributed"], first, published, log=say)

        class Slow(diloco.DumbDiLoCo):
            def after_step(self, trainer):
                clock.sleep(1 / self.speed)
                super().after_step(trainer)

        def node(i):
            clock.sleep(dict(enumerate(joins)).get(i, 0.0))
            name = f"n{i}"
            own = copy.deepcopy(config)
            own["distributed"]["node_id"] = own["run"]["name"] = name
            own["run"]["output_dir"] = folder
            coordinator = Slow(Far(hub, latency, loss, i), name, own["distributed"])
            coordinator.speed = speeds[i]
            trainer = trainers[name] = Trainer(build_model(own["model"]), own, build_data(own)[0],
                                               coordinator=coordinator)
            trainer.emit = lambda event, line, **_: say(f"{clock.now:8.1f} {name} {event} {line}")
            trainer.save = lambda: None
            trainer.train()
            left.remove(i)
            if coordinator.failed:
                raise coordinator.failed

        def end():
            def running():
                return (left or not master.state.finished) and not clock.errors
            while running() and clock.now < seconds:
                clock.sleep(1.0)
            if running():       # the time is over
                for trainer in trainers.values():
                    trainer.stop_signal = "the clock"
            master.stop = master.stop or bool(running() or clock.errors)
            master.seconds = clock.now
        clock.run(master.run, end, *[functools.partial(node, i) for i in range(len(speeds))])
    return master, trainers


def test_a_swarm_in_virtual_time_is_deterministic_and_loses_nothing(tmp_path):
    config = tiny(tmp_path, "--max-steps=40", "--inner-steps=10", "--codec=int4", "--join-warmup=5",
                  "--optimizer.name=muon")
    runs = [simulate(config, [1.0, 0.7, 0.55], latency=4.0, joins=[0, 0, 20]) for _ in range(2)]
    (one, trainers), (two, _) = runs
    assert all(torch.equal(one.weights[k], two.weights[k]) for k in one.weights)
    assert one.history == two.history and one.state.outer_step > 3
    for name, entry in one.state.nodes.items():
        assert entry.local_step == trainers[name].step and entry.lost == 0
        assert entry.steps == trainers[name].step - trainers[name].coordinator.first_step
    lossy, _ = simulate(config, [1.0, 0.7], latency=4.0, loss=0.3)
    assert sum(len(e.gaps) for e in lossy.state.nodes.values()) > 0
    assert lossy.state.finished, "also if the last delta of a node never comes"
    for entry in lossy.state.nodes.values():
        assert entry.steps + entry.lost == entry.local_step


@pytest.mark.parametrize("speeds, most", [([1.0, 1.0, 0.1], 100), ([1.0, 0.6], 95), ([1.0], 70)])
def test_the_swarm_ends_as_one(tmp_path, speeds, most):
    """Its clock is the mean progress of the nodes: a slow one does not train on alone, and a fast
    one does not stop before."""
    lines = []
    config = tiny(tmp_path, "--max-steps=60", "--inner-steps=10", "--codec=int4")
    master, trainers = simulate(config, speeds, log=lines.append)
    assert master.seconds < most and master.state.finished
    assert master.state.keyframe == master.state.outer_step
    steps = {name: trainer.step for name, trainer in trainers.items()}
    counted = [s for s in steps.values() if 2 * s >= max(steps.values())]
    assert statistics.mean(counted) == pytest.approx(60, abs=6), steps
    for name, entry in master.state.nodes.items():
        assert entry.final and entry.lost == 0 and entry.steps == steps[name], name
    assert any(line.startswith("finished") and "outer step" in line for line in lines)


@pytest.mark.parametrize("speeds, expected", [([2.0, 1.0, 0.5], [20, 10, 5]),
                                              ([1.0, 1.0, 0.1], [10, 10, 2])])
def test_the_loops_of_all_nodes_take_the_same_time(tmp_path, speeds, expected):
    """Once all speeds are known, but for a tenth, the time between two looks at the hub; and a loop
    has at least a quarter of inner_steps."""
    config = tiny(tmp_path, "--max-steps=180", "--inner-steps=10", "--codec=int4")
    master, _ = simulate(config, speeds)
    merged = [entry for line in history_of(master.transport) for entry in line.get("merged", ())]
    for i, usual in enumerate(expected):
        steps = [entry["steps"] for entry in merged if entry["node"] == f"n{i}"]
        assert steps[0] <= 5, "short until the pace is known"
        assert abs(statistics.median(steps[3:-1]) - usual) <= 0.15 * usual, steps


def test_nodes_come_into_step(tmp_path):
    """However they began: after seven rounds, the first ones short, each round has one delta of
    each, and none has missed more than the one round that was under way."""
    config = tiny(tmp_path, "--max-steps=120", "--inner-steps=10", "--codec=int4")
    master, _ = simulate(config, SPEEDS, latency=2.5, joins=(0.0, 6.5, 2.0, 3.5))
    rounds = [line for line in history_of(master.transport) if line.get("merged")][7:-3]
    assert len(rounds) > 2
    for line in rounds:
        late = [line["outer_step"] - 1 - delta["base_outer_step"] for delta in line["merged"]]
        assert len(late) == len(SPEEDS) and max(late) <= 0, line


def test_the_outer_momentum_grows_and_falls():
    settings = {"outer_momentum": 0.9, "outer_warmup": 4, "inner_steps": 10, "wait": False}
    state = diloco.SwarmState("run", config={"run": {"max_steps": 100}})

    def momentum(outer_step, step, **other):
        state.outer_step, state.progress = outer_step, step
        left = diloco.rounds_left({**settings, **other}, state)
        return diloco.outer_momentum({**settings, **other}, outer_step, left)
    assert [momentum(n, 10 * n) for n in range(11)] == pytest.approx(
        [0.225, 0.45, 0.675, 0.9, 0.9, 0.9, 0.9, 0.9, 0.6, 0.3, 0.0])
    assert momentum(9, 90, wait=True) == 0.9 and momentum(0, 0, outer_warmup=0) == 0.9


def test_a_simulation_stops_at_a_time(tmp_path):
    config = tiny(tmp_path, "--max-steps=60", "--inner-steps=10", "--codec=int4")
    master, trainers = simulate(config, [1.0, 0.6], latency=3.0, seconds=40)
    assert master.seconds == 40 and not master.state.finished and master.state.outer_step > 0
    assert all(trainer.step < 42 for trainer in trainers.values())


def test_what_comes_after_the_last_outer_step_waits_for_a_longer_run(folder):
    master, a = make_master(folder, max_outer_steps=1), Node(folder)
    a.send(1)
    master.run()
    assert master.state.finished and any(line.startswith("finished") for line in master.lines)
    a.see()
    a.train()
    a.node.push(a, last=True)       # ended early: the node may go on later
    a.upload()
    late = make_master(folder, max_outer_steps=1)
    late.run()
    assert any("1 deltas came after the last outer step" in line for line in late.lines)
    longer = make_master(folder, max_outer_steps=2)
    longer.run()
    assert counts(longer) == (2, 2, 0) and not folder.list("nodes/")
    assert not longer.state.nodes["a"].final


def test_the_last_delta_of_a_node_is_final_though_the_swarm_has_moved_the_end(folder):
    master = make_master(folder, config={"run": {"max_steps": 4}})
    a, b = Node(folder), Node(folder, "b")
    a.node.target = b.node.target = 4
    a.send(2)
    b.send(1)
    master.sync_once()          # the clock stands at 1.5
    a.train()                   # as far as it was to go
    a.see()
    assert a.node.end(a) > a.step
    a.node.push(a, last=True)
    a.upload()
    master.sync_once()
    assert master.state.nodes["a"].final and not master.state.nodes["b"].final


def test_a_node_that_is_gone_for_good_does_not_keep_the_swarm_from_its_end(folder, monkeypatch):
    master = make_master(folder, config={"run": {"max_steps": 8}})
    a, b = Node(folder, "a"), Node(folder, "b")
    for node in (a, b):
        node.send(4)
    master.sync_once()
    master.end_without_the_silent()
    assert not master.state.finished, "all are at work"
    a.see()
    a.train(4)
    a.node.push(a, last=True)
    a.upload()
    master.sync_once()
    master.end_without_the_silent()
    assert master.state.nodes["a"].final and not master.state.finished, "b has just been here"
    clock = itertools.count(time.time() + 1e4, 100)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    master.run()
    assert master.state.finished and any("nothing has come from b" in x for x in master.lines)


def test_max_outer_steps_ends_the_nodes_too(tmp_path):
    flags = ["--max-steps=500", "--inner-steps=10", "--max-outer-steps=3"]
    master, trainers = simulate(tiny(tmp_path, *flags), [1.0, 0.9])
    assert master.state.outer_step == 3 == master.state.keyframe
    assert all(trainer.step < 100 for trainer in trainers.values())


def test_settings_with_which_a_master_is_started_again_reach_the_nodes(folder, capsys):
    config = {"run": {"max_steps": 40, "seed": 1}, "optimizer": {"lr": 0.1, "betas": [0.9, 0.95]},
              "scheduler": {"name": "cosine", "max_steps": 0}, "model": {"n_layer": 2},
              "distributed": {"inner_steps": 50}}
    make_master(folder, config=config)
    a = Node(folder)
    a.config = {"data": {"target_batch_size": 2}, "run": {"max_steps": 40, "seed": 1},
                "optimizer": {"lr": 0.1, "betas": (0.9, 0.95)},
                "scheduler": {"name": "cosine", "max_steps": 40}}
    a.node.target, a.node.settings["inner_steps"] = 40, 50
    other = copy.deepcopy(config)
    other["run"] = {"max_steps": 80, "seed": 2}
    other["optimizer"]["lr"], other["distributed"]["inner_steps"] = 0.05, 20
    master = make_master(folder, config=other)
    assert "setting  run.max_steps is 80 now, was 40: the workers take it over" in master.lines
    a.see()
    assert a.node.target == 80 == a.config["run"]["max_steps"]
    assert a.config["scheduler"]["max_steps"] == 80, "the learning rate curve is stretched"
    assert a.config["optimizer"]["lr"] == 0.05 and a.node.settings["inner_steps"] == 20
    said = capsys.readouterr().out
    assert "run.max_steps is 80 now" in said and "optimizer.lr is 0.05" in said
    assert "run.seed=2 now, not 1: it counts here when this worker starts again" in said
    a.config["optimizer"]["lr"] = 0.3           # a flag of this worker's own
    other["optimizer"]["lr"] = 0.2
    other["distributed"]["codec"] = "fp32"
    b = Node(folder, "b")
    make_master(folder, config=other)
    a.see()
    assert a.config["optimizer"]["lr"] == 0.3
    b.see()
    other["distributed"]["codec"] = "int3"
    make_master(folder, config=other)
    b.see()
    assert b.stop_signal == "Refused" and "codec=int3" in str(b.node.failed)
    other["model"]["n_layer"] = 3
    with pytest.raises(diloco.Refused, match="model.n_layer=3: the model of this hub has 2"):
        make_master(folder, config=other)


def test_a_master_started_again_with_other_flags_changes_the_run_but_not_the_model():
    published = json.loads(json.dumps(config_module.shared_settings(
        load_config(["--config=smoke", "--max-steps=40"]))))
    longer = load_config(["--max-steps=80"], published)
    assert longer["scheduler"]["max_steps"] == 80, "the learning rate is stretched"
    assert longer["model"]["d_model"] == 64 and longer["run"]["name"] == "smoke"
    fixed = config_module.shared_settings(load_config(["--scheduler.max-steps=60"]))
    assert load_config(["--max-steps=80"], fixed)["scheduler"]["max_steps"] == 60
    assert config_module.check_named(["--config=smoke", "--lr=1"], published) == []
    assert config_module.check_named(["--lr=1"], published) == []
    with pytest.raises(ValueError, match="--config=gpt2 is another model .* model.vocab_size"):
        config_module.check_named(["--config=gpt2"], published)
    published["model"] = config_module.shared_settings(load_config([]))["model"]
    line, = config_module.check_named(["--config=small"], published)
    assert "run.max_steps=40" in line and line.startswith("notice   --config=small")


def test_an_extended_run_goes_on(folder):
    """The master is started again with more steps after all have ended."""
    short, long = ({"run": {"max_steps": steps}} for steps in (4, 8))
    master, a = make_master(folder, config=short), Node(folder)
    a.node.target = 4
    exchange(master, a, steps=4)
    assert master.state.finished and a.config["run"]["max_steps"] == 4
    assert master.over(master.waiting()[0])
    assert make_master(folder, config=short).state.finished
    master = make_master(folder, config=long)
    assert not master.state.finished and not master.state.nodes["a"].final
    a.see()
    assert a.config["run"]["max_steps"] == 8


def test_the_page_comes_every_ten_minutes_and_no_round_waits_for_it():
    hub, pages = Memory(), []
    commit = hub.commit

    def every_other_fails(add, *args, **kwargs):
        if diloco.PAGE in add:
            pages.append(clock.now)
            if len(pages) % 2:
                raise diloco.Unavailable("busy")
        return commit(add, *args, **kwargs)
    hub.commit = every_other_fails
    with virtual_time() as clock:
        master = diloco.MasterOuterLoop(
            hub, {**SWARM, "poll_interval": 5.0}, diloco.swarm_tensors(Net()), {},
            draw=lambda curves: "<svg/>", log=lambda line: None)

        def work():
            node = Node(hub, threads=True, inner_steps=1)
            while clock.now < 3600:
                node.train()
                clock.sleep(60)
                node.node.after_step(node)

        def end():
            clock.sleep(3600)
            master.stop = True
        clock.run(master.run, work, end)
    assert all(600 <= b - a < 610 for a, b in itertools.pairwise(pages)) and len(pages) >= 6
    assert master.state.outer_step > 50


@pytest.mark.parametrize("nodes, hours", [(3, 24), (12, 8), (50, 4)])
def test_a_day_on_a_hub_with_a_commit_limit(nodes, hours):
    """Inner loops of five to ten minutes: more than the limit allows for the many."""
    hub, day = Memory(limited=True), hours * 3600
    settings = {**SWARM, "commits_per_hour": 100, "round_timeout": 0.0, "poll_interval": 120.0,
                "outer_momentum": 0.5, "inner_steps": 1}
    with virtual_time() as clock:
        master = diloco.MasterOuterLoop(hub, settings, diloco.swarm_tensors(Net()), {},
                                        log=lambda line: None)
        workers = {}

        def work(name):
            node = workers[name] = Node(hub, name, threads=True, **settings)
            while clock.now < day:
                node.train()
                clock.sleep(300 * (1 + len(workers) % 3 / 2))
                node.node.after_step(node)
            node.node.finish(node)

        def end():
            clock.sleep(day + 8000)      # the last deltas wait for their turn
            master.stop = True
        clock.run(master.run, end, *[functools.partial(work, f"n{i}") for i in range(nodes)])
    for i, t in enumerate(hub.commits):
        assert sum(t <= u < t + 3600 for u in hub.commits[i:]) <= 100
    assert master.state.outer_step >= hours
    for name, entry in master.state.nodes.items():
        assert entry.steps == entry.local_step == workers[name].step, "no node starves"

# ---- diloco.py over the loopback Hub
# - folder, Hub and Hub with a bucket keep the same promises, also while they are empty
# - an idle look is one HEAD, a round costs what its deltas cost, in requests and in bytes
# - a squash, a full storage, a lost answer, damaged bytes: nothing lost, nothing doubled
# - each answer of the Hub is what it means: to be tried again, or the end in one line
# - a repository that moves is followed, by each way the Hub has to say it
# - a patient transport retries what it reads, and no commit


@pytest.fixture
def remote(hub, monkeypatch):
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    hub.faults.clear()
    return diloco.open_hub(f"me/repo{len(hub.repos)}", create=True)


@pytest.mark.parametrize("kind", ["hub", "folder", "bucket"])
def test_all_transports_keep_the_same_promises(request, tmp_path, kind):
    if kind == "hub":
        transport = request.getfixturevalue("remote")
    elif kind == "bucket":
        transport = Split(request.getfixturevalue("store"))
    else:
        transport = diloco.FolderTransport(tmp_path / "new")
    big, delta, to = tmp_path / "w", "nodes/a/delta_1.safetensors", tmp_path / "in/file"
    big.write_bytes(os.urandom(5000))
    first, _ = transport.head()
    assert transport.read(diloco.STEP) == (first, None) == transport.read(diloco.PAGE)
    assert transport.list("nodes/") == [] == transport.list("")
    with pytest.raises(FileNotFoundError):
        transport.fetch(diloco.WEIGHTS, first, to)
    assert not (tmp_path / "new").exists(), "reading makes nothing"
    version = transport.commit({diloco.STEP: b"{}", delta: big})
    assert transport.head()[0] == version != first and (kind == "bucket" or diloco.matches_hash(
        b"{}", transport.head()[1]))
    assert transport.read(diloco.STEP) == (version, b"{}") == transport.read(diloco.STEP, version)
    assert transport.read("missing")[1] is None
    ((path, size, tag),) = transport.list("nodes/", version)
    assert (path, size) == (delta, 5000) and transport.list("none/") == []
    transport.fetch(delta, version, to, tag)
    assert to.read_bytes() == big.read_bytes()
    with pytest.raises(FileNotFoundError):
        transport.fetch("missing.safetensors", version, to)
    with pytest.raises((diloco.Unavailable, FileNotFoundError)):
        transport.fetch(delta, version, to, hashlib.sha256(b"other").hexdigest())
    with pytest.raises(diloco.Conflict):
        transport.commit({"x": b"1"}, expect=first)
    tag = transport.head()[1]
    newer = transport.commit({"nodes/b/delta_7.safetensors": big, "y": b"1"}, [delta], version)
    assert transport.head() == (newer, tag), "the tag is of the state alone"
    assert [path for path, _, _ in transport.list("nodes/")] == ["nodes/b/delta_7.safetensors"]


def test_requests_to_the_hub_are_counted(hub, remote, tmp_path):
    big = tmp_path / "w.safetensors"
    big.write_bytes(b"x" * 100)
    remote.commit({f"nodes/n{i}/delta_1.safetensors": big for i in range(250)})
    assert len(remote.list("nodes/")) == 250, "listings come in pages"
    remote.commit({}, [path for path, _, _ in remote.list("nodes/")])
    master, a, b = make_master(remote), Node(remote), Node(remote, "b")

    def requests(work):
        hub.counts.clear()
        work()
        return hub.counts.total()
    a.see()
    master.waiting()
    for _ in range(2):
        assert requests(a.look) == 1 and list(hub.counts) == [
            f"HEAD /me/{remote.repo[3:]}/resolve/main/global/step_count.json"]
        assert requests(master.waiting) == 1
        a.train()
        b.train()
        assert requests(a.send) <= 7, hub.counts    # list, preupload, LFS and commit
        b.send()
        assert requests(a.look) == 1, "what other nodes send is no news"
        a.node.take_results(a)
        # HEAD, two listings, 2 for each delta; preupload, LFS for the update or three files of a
        # keyframe, commit
        assert requests(master.sync_once) <= 3 + 2 * 2 + 12, hub.counts
        # HEAD, the state, HEAD and GET of the update
        assert requests(a.look) == 4, hub.counts
        a.node.take_results(a)
        b.see()
        master.waiting()


def test_bytes_of_a_round_are_counted_at_the_hub(hub, remote, monkeypatch):
    """int4, over the rounds between two keyframes: a worker sends 0.6 bytes a parameter and round
    and receives 1.15; the master sends 1.8."""
    monkeypatch.setattr(Node, "make", lambda self: nn.Linear(256, 256))
    settings = {**SWARM, "codec": "int4", "keyframe_every": 10, "outer_momentum": 0.9}
    master = diloco.MasterOuterLoop(remote, settings, diloco.swarm_tensors(nn.Linear(256, 256)),
                                    {"config": {}}, log=lambda line: None)
    a, size, totals = Node(remote, **settings), 256 * 257, Counter()

    def count(what, work, way):
        before = hub.bytes[way]
        work()
        totals[what] += hub.bytes[way] - before
    for _ in range(10):
        a.train()
        count("worker up", a.send, "in")
        count("master up", master.sync_once, "in")
        count("worker down", a.see, "out")
    assert a.node.state.outer_step == 10 == a.node.state.keyframe
    # the state, the history and headers are 6 KB a round, whatever the size of the model
    most = {"worker up": 0.6, "worker down": 1.15, "master up": 1.8}
    assert all(totals[what] / 10 < most[what] * size + 6000 for what in most), totals


def test_a_squash_is_survived(hub, remote):
    master = make_master(remote, squash_gb=1e-6)        # a kilobyte: after each round
    a = Node(remote)
    assert exchange(master, a) == 1 and len(hub.repos[remote.repo]) == 1
    a.send(1)
    version = remote.head()[0]
    remote.squash()
    with pytest.raises(FileNotFoundError):
        remote.fetch(diloco.WEIGHTS, version, a.node.folder / "x")
    assert master.sync_once() == 2
    a.see()
    assert a.node.state.outer_step == 2
    assert sum("GB were committed" in line for line in master.lines) == 2


def test_a_full_storage_is_squashed_and_waited_for(folder, monkeypatch):
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    master, a, real, squashes, tries = make_master(folder), Node(folder), folder.commit, [], []

    def full(*args):
        tries.append(1)
        if len(tries) < 4:
            raise diloco.StorageFull("403 storage limit reached")
        return real(*args)
    a.send(1)
    folder.squash, folder.commit = lambda: squashes.append(1), full
    assert master.sync_once() == 1 and len(squashes) == 1 and len(tries) == 4
    assert any("storage is full" in line for line in master.lines)
    assert any("storage limit" in line for line in master.lines)


def test_each_answer_of_the_hub_is_what_it_means(hub, remote, tmp_path):
    big, full = tmp_path / "w.safetensors", "Private repository storage limit reached, please pay"
    for kind, answers, paths, says in (
            (diloco.Refused, [401, 403, 400], ["/commit/"], None),
            (diloco.Conflict, [412], ["/commit/"], None),
            (diloco.Unavailable, [409, 429, 500, 503, "reset", "lose"], ["/commit/"], None),
            (diloco.StorageFull, [403], ["/commit/", "/preupload/", "/info/lfs/"], full)):
        for answer, path in itertools.product(answers, paths):
            big.write_bytes(os.urandom(3000))
            hub.fault("POST", path, answer, says=says, Retry_After="7")
            with pytest.raises(kind) as e:
                remote.commit({"w.safetensors": big}, expect=remote.head()[0])
            assert "\n" not in str(e.value.args[0])
            assert e.value.args[1:] == {429: (7.0,), 403: (60.0,) if says else ()}.get(
                answer, e.value.args[1:])
            assert hub.faults == []
        assert kind is diloco.Refused or remote.commit({"w.safetensors": big})


@pytest.mark.parametrize("headers, seconds", [
    ({"Retry_After": "7"}, 7.0), ({"RateLimit": '"api";r=0;t=9'}, 9.0), ({}, 60.0),
    ({"RateLimit": '"api";r=949;t=9'}, 60.0)])      # of another limit than this one
def test_a_busy_hub_says_how_long_to_wait(hub, remote, headers, seconds):
    hub.fault("POST", "/commit/", 429, **headers)
    with pytest.raises(diloco.Unavailable) as e:
        remote.commit({"x": b"0"})
    assert e.value.args[1] == seconds


def test_one_403_is_not_the_end_of_a_node_and_lasting_ones_are(hub, remote):
    hub.fault("POST", "/commit/", 403)
    with pytest.raises(diloco.Refused, match="may it write"):       # it never could
        remote.commit({"x": b"0"})
    for i in range(2):          # a commit that is made starts the count again
        remote.commit({"x": b"1%d" % i})
        hub.fault("POST", "/commit/", 403, count=diloco.DENIALS if i == 0 else 99)
        said = []
        for _ in range(diloco.DENIALS):
            with pytest.raises(diloco.Unavailable) as e:
                remote.commit({"x": b"2"})
            said.append(e.value.args[1])
        assert said == [10.0, 20.0, 30.0, 40.0, 50.0]
    with pytest.raises(diloco.Refused, match="403"):
        remote.commit({"x": b"4"})


def test_missing_repo_and_bad_names_are_refused(hub):
    with pytest.raises(diloco.NoRepository, match="404"):
        diloco.open_hub("me/nothing").head()
    for name in ("nothing", "a/b/c", "http://x/y", "C:\\hub"):
        with pytest.raises(ValueError, match="distributed.hub"):
            diloco.open_hub(name)
    assert diloco.open_hub("~/hub").root == Path.home() / "hub"


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_repository_that_moves_is_followed(hub, remote, tmp_path, status):
    """Reads are sent on. A POST need not be: then the new name is learnt."""
    big, names = tmp_path / "w.safetensors", [remote.repo]
    for i in range(2):
        big.write_bytes(os.urandom(2000))
        names.append(f"{names[0]}-{status}-{i}")
        hub.rename(*names[-2:], status)
        said, files = [], {diloco.STEP: b"{}", "nodes/a/w.safetensors": big}
        version = diloco.retry(lambda: remote.commit(files), lambda *what: said.append(what[0]))
        assert hub.at(names[-1])[0] == version == remote.head()[0]
        assert said == [f"the repository is {names[-1]} now: start with --hub={names[-1]} next "
                        f"time"] * (status < 307)
        assert remote.read(diloco.STEP) == (version, b"{}")
        ((path, _, tag),) = remote.list("nodes/")
        remote.fetch(path, version, tmp_path / "to", tag)
        assert (tmp_path / "to").read_bytes() == big.read_bytes()
        diloco.retry(remote.squash, lambda *_: None)


def test_offline_is_one_line(tmp_path):
    done = run_script(["--hub=me/repo", "--config=smoke", "--node-id=a"], tmp_path, "worker.py",
                      env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr


def test_a_patient_transport_retries_what_it_reads_and_no_commit(tmp_path, monkeypatch):
    """Each verb fails twice before it works."""
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    memory, calls, said, stopping = Memory(), Counter(), [], []

    class Moody:
        def __getattr__(self, name):
            verb = getattr(memory, name)

            def moody(*args):
                calls[name] += 1
                if calls[name] % 3:
                    raise diloco.Unavailable(f"no {name} now", 7.0)
                return verb(*args)
            return moody if callable(verb) else verb
    patient = diloco.Patient(Moody(), lambda *what: said.append(what), lambda: bool(stopping))
    assert patient.least_poll == Memory.least_poll and patient.limited is False
    for verb, args in (("commit", ({diloco.STEP: b"{}"},)), ("squash", ())):
        for _ in range(2):      # once each: whether it was made is the caller's question
            with pytest.raises(diloco.Unavailable):
                getattr(patient, verb)(*args)
        getattr(patient, verb)(*args)
    assert said == [] and memory.files == {diloco.STEP: b"{}"}
    for verb, *args in (("head",), ("read", diloco.STEP), ("list", "global/"),
                        ("fetch", diloco.STEP, None, tmp_path / "to")):
        assert getattr(patient, verb)(*args) == getattr(memory, verb)(*args)
        assert said == [(f"no {verb} now", 7.0)] * 2
        said.clear()
    calls["fetch"] = 2
    with pytest.raises(FileNotFoundError):      # what does not pass comes at once
        patient.fetch("missing", None, tmp_path / "to")
    stopping.append(True)
    with pytest.raises(diloco.Unavailable):
        patient.head()
    assert said == []


@pytest.mark.parametrize("action", ["corrupt", "reset", 502])
def test_damaged_downloads_are_noticed_and_read_again(hub, remote, tmp_path, action):
    version = remote.commit({diloco.WEIGHTS: b"w" * 3000, diloco.STEP: b"{}"})
    ((_, _, tag), _), seen, to = remote.list("global/"), [], tmp_path / "w"
    hub.fault("GET", "resolve", action, count=2)
    diloco.retry(lambda: remote.fetch(diloco.WEIGHTS, version, to, tag), lambda *e: seen.append(e))
    assert to.read_bytes() == b"w" * 3000
    assert seen or action == "reset", "the client itself takes up a download that was cut off"
    hub.fault("GET", "resolve", action, count=2)
    assert diloco.retry(lambda: remote.read(diloco.STEP), lambda *e: None) == (version, b"{}")


def test_a_swarm_over_a_bad_hub_loses_and_doubles_nothing(hub, remote):
    master = make_master(remote, outer_lr=1.0, outer_momentum=0.0, squash_gb=1e-5)
    a = Node(remote, max_pending=9)
    for i in range(6):
        a.train(2)
        for fault in [("POST", "/commit/", "lose"), ("POST", "/commit/", 503),
                      ("HEAD", "resolve", 500), ("GET", "resolve", "corrupt"),
                      ("POST", "/commit/", 409), ("GET", "/tree/", "reset")][i:i + 2]:
            hub.fault(*fault)
        a.send()
        hub.fault("POST", "/commit/", "lose" if i % 2 else 412)
        master.sync_once()
        a.see()
    assert master.state.outer_step == 6 and master.state.nodes["a"].steps == 12
    assert all(torch.equal(v, a.work[k]) and torch.equal(v, master.weights[k])
               for k, v in a.weights().items())
    assert [line["outer_step"] for line in history_of(remote)] == [1, 2, 3, 4, 5, 6]

# ---- diloco.py: a repository and a bucket
# - over a folder too: whoever is killed or loses an answer at any call, nothing is lost or doubled
# - a worker makes no commit; the commit budget is the master's alone
# - what no state names is never read, and goes; what outlives its deletion goes later
# - a damaged object is not taken; a bucket that goes is made again, by the master alone
# - where there can be no bucket, a new swarm goes on without; one that runs keeps what it has


class Store(Memory):
    """A repository in memory, and a bucket: what HubTransport asks the client for, without HTTP,
    because uploads to a real bucket need a Xet store."""

    def __init__(self):
        super().__init__()
        self.objects, self.clock, self.spoil = {}, 0, None     # {name: (when, content)}

    def tree(self, prefix):
        if self.objects is None:
            raise client_error("BucketNotFoundError", 404)
        return [types.SimpleNamespace(path=name, size=len(content), uploaded_at=when)
                for name, (when, content) in self.objects.items() if name.startswith(prefix or "")]

    def batch(self, add, delete):
        self.clock += 1
        for content, name in add:
            content = content if isinstance(content, bytes) else Path(content).read_bytes()
            self.objects[name] = self.clock, content
        for name in delete:
            self.objects.pop(name)

    def get(self, name):
        if name not in self.objects:
            raise client_error("RemoteEntryNotFoundError", 404)
        content = self.objects[name][1]
        spoilt = self.spoil and re.search(self.spoil, name)
        return content[:-1] + bytes([content[-1] ^ 1]) if spoilt else content


def client_error(kind, status, **attributes):
    import huggingface_hub.errors
    answer = types.SimpleNamespace(status_code=status, headers={}, request=None,
                                   url="https://hub.example/api/buckets/me/repo-swarm")
    error = getattr(huggingface_hub.errors, kind)(kind, response=answer)
    vars(error).update(attributes)
    return error


class Split(diloco.HubTransport):
    """The real transport over a Store, with a Shaky line between them. how="half": a batch is done
    in part."""

    def __init__(self, store, n=10**9, how="before", is_master=False):
        super().__init__("me/repo")
        self.store, self.how, self.is_master = Shaky(store, n, how), how, is_master
        self.bucket, self.api = "me/repo-swarm", self

    def list_bucket_tree(self, bucket, prefix, recursive):
        return self.store.tree(prefix)

    def batch_bucket_files(self, bucket, add=(), delete=()):
        if self.store.left != 1 or self.how != "half":
            return self.store.batch(add, delete)
        done = len(add) // 2, len(delete) // 2
        with contextlib.suppress(diloco.Unavailable):
            self.store.batch(add[:done[0]], delete[:done[1]])
        failed = [name for _, name in add[done[0]:]] + delete[done[1]:]
        raise client_error("BucketBatchError", 200, failures=[{"path": p} for p in failed])

    def create_bucket(self, name):
        self.store.transport.objects = {}

    def bucket_get(self, path, digest, folder):
        Path(folder, "x").write_bytes(self.store.get(diloco.object_name(path, digest)))
        return Path(folder, "x")

    def repo_get(self, path, version, folder):
        if path not in self.store.transport.files:
            raise client_error("RemoteEntryNotFoundError", 404)
        self.store.fetch(path, version, Path(folder, "x"))
        return Path(folder, "x")

    def head(self):
        return self.store.head()

    def repo_read(self, path, version):
        return self.store.read(path)

    def repo_list(self, prefix, version):
        return self.store.list(prefix)

    def repo_commit(self, *args):
        return self.store.commit(*args)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    monkeypatch.setattr(diloco, "require_buckets", lambda hub: None)
    return Store()


def named_objects(store):
    state = diloco.parse_state(store.files[diloco.STEP])
    return {diloco.object_name(path, file["sha256"]) for path, file in state.files.items()
            if diloco.IN_BUCKET.match(path)}


HOW = ["before", "lose", "half"]


@pytest.mark.parametrize("kind, how", [*itertools.product(["folder", "bucket"], HOW[:2]),
                                       ("bucket", "half")])
def test_a_master_killed_anywhere_is_replaced_bit_for_bit(tmp_path, monkeypatch, kind, how):
    monkeypatch.setattr(diloco, "require_buckets", lambda hub: None)
    monkeypatch.setattr(diloco, "wait", lambda *_: None)

    def story(n):
        """Two rounds; the master dies at its n-th call, and one with an empty disk takes over."""
        torch.manual_seed(1)
        hub = Store() if kind == "bucket" else diloco.FolderTransport(tmp_path / str(n))
        reach = functools.partial(Split if kind == "bucket" else Shaky, hub)
        make_master(reach(), keyframe_every=2)
        nodes = [Node(reach(), name, max_pending=9) for name in "ab"]
        shaky, master = reach(n, how), None
        for _ in range(2):
            for node in nodes:
                node.send(3, size=0.1)
            for _ in range(3):
                try:
                    master = master or make_master(shaky, keyframe_every=2)
                    master.sync_once()
                    break
                except Stop:
                    master = None
            for node in nodes:
                node.see()
        reached = (shaky.store if kind == "bucket" else shaky).left <= 0
        return hub, make_master(reach()), nodes, reached
    _, want, _, _ = story(10**9)
    for n in range(1, 80):
        hub, master, nodes, reached = story(n)
        assert same(master.weights, want.weights) and same(master.momentum, want.momentum), n
        assert counts(master, "a") == counts(master, "b") == (6, 6, 0), n
        assert not any(event == "refused" for x in nodes for event, _ in x.events)
        if kind == "bucket":        # what was left over goes with the next round
            assert named_objects(hub) <= hub.objects.keys()
            nodes[0].send(1)
            master.sync_once()
            assert hub.objects.keys() == named_objects(hub), n
        if not reached:
            break
    assert 10 < n < 79


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_whoever_is_killed_whenever_the_books_balance(folder, store, kind, seed):
    """A worker and a master that are killed or lose their answers anywhere, with a second master
    now and then."""
    chance = random.Random(seed)
    reach = functools.partial(*((Split, store) if kind == "bucket" else (Shaky, folder)))

    def shaky():
        return reach(chance.randrange(5, 60), chance.choice(HOW))
    master, a = make_master(reach(), **PLAIN), Node(reach(), max_pending=99)
    saved = a.save()
    for _ in range(120):
        action = chance.choice(["train", "train", "send", "see", "merge", "merge", "save", "kill"])
        try:
            if action == "merge":
                if master is None or chance.random() < 0.1:
                    master = make_master(shaky(), **PLAIN)
                master.sync_once()
            elif action == "train":
                a.train()
            elif action == "send" and not a.node.uploading:
                a.send() if chance.random() < 0.6 else a.node.push(a)
            elif action == "see":
                a.upload()
                a.see()
            elif action == "save":
                saved = a.save()
            elif action == "kill":
                a = Node(shaky(), saved=saved, max_pending=99)
                assert a.position == a.step * 2
        except diloco.Superseded:
            master = None
        except Stop:
            if action == "merge":
                master = None
            else:
                a = Node(reach(), saved=saved, max_pending=99)
    a = Node(reach(), saved=a.save(), max_pending=99)
    a.upload()
    a.node.take_results(a)
    master = make_master(reach(), **PLAIN)
    exchange(master, a)
    assert counts(master) == (a.step, a.step, 0)
    assert same(a.weights(), master.weights), "all it has learned is in the global"
    assert not any(event == "refused" for event, _ in a.events)


def test_a_worker_makes_no_commit_and_the_budget_is_the_masters(store):
    master = make_master(Split(store, is_master=True))
    nodes, commits = [Node(Split(store), f"n{i}") for i in range(3)], len(store.commits)
    for node in nodes:
        node.send(1)
    assert len(store.commits) == commits and len(store.objects) == 3 + 1
    assert master.transport.limited and not nodes[0].node.transport.limited
    assert master.sync_once() == 1 and len(store.commits) == commits + 1
    state, now, times = master.state, time.time(), []
    while diloco.may_commit({"commits_per_hour": 100}, master.transport, state, times, last=True):
        times.append(now)
    assert len(times) == 100 and state.bucket == "me/repo-swarm"
    assert state.committed == 0 or state.committed < 20_000, "what is in the bucket is no history"


@pytest.mark.parametrize("spoil", ["nodes/a", "global/update_2"])
def test_a_damaged_object_is_not_taken(store, spoil):
    master = make_master(Split(store, is_master=True), keyframe_every=9)
    a, b = Node(Split(store)), Node(Split(store), "b")

    def round_of():
        for node in (a, b):
            node.send(1)
            node.node.take_results(node)
        return master.sync_once()
    round_of()
    a.see()
    round_of()
    store.spoil = spoil
    if spoil == "nodes/a":          # for good: one object must not stop the others
        assert round_of() == 3 and any("not what its name says" in line for line in master.lines)
        assert master.state.nodes["b"].steps == 3
    else:                           # the reader looks again
        at, state = diloco.read_state(a.node.transport)
        with pytest.raises(diloco.Unavailable, match="arrived damaged"):
            diloco.fetch_global(a.node.transport, at, state, a.node.folder, a.node.local.shapes)
        store.spoil = None
        a.see()
        assert a.node.state.outer_step == 2
        assert same(a.node.local.G, master.weights)


def test_a_bucket_that_is_deleted_is_made_again_by_the_master(store):
    master, a = make_master(Split(store, is_master=True), keyframe_every=9), Node(Split(store))
    exchange(master, a)
    a.send(1)
    a.node.take_results(a)
    store.objects = None
    for _ in range(diloco.DENIALS):         # a worker waits for it, but not for ever
        with pytest.raises(diloco.Unavailable, match="makes it again"):
            a.node.transport.list("nodes/a/")
    with pytest.raises(diloco.Refused, match="no such bucket"):
        a.node.transport.list("nodes/a/")
    a.node.transport.denied = 0
    assert master.sync_once() == 1
    assert exchange(master, a) == 2 == master.state.keyframe, "its files were gone: a keyframe"
    assert counts(master) == (3, 2, 1)
    assert exchange(master, a) == 3 and counts(master) == (4, 4, 0)
    assert same(Node(Split(store), "late").node.local.G, master.weights)


def test_where_there_can_be_no_bucket_the_repository_will_do(hub, monkeypatch, capsys):
    monkeypatch.setattr(diloco, "wait", lambda *_: None)
    for i, reason in enumerate(["HF_HUB_DISABLE_XET", "404"]):
        if reason == "404":     # of a Hub that has none
            monkeypatch.setattr(diloco, "require_buckets", lambda hub: None)
        transport = diloco.open_hub(f"me/none{i}", create=True, bucket="auto")
        assert transport.bucket == "" and transport.limited
        out = capsys.readouterr().out
        assert out.startswith(f"notice   no bucket me/none{i}-swarm (") and reason in out
        master, a = make_master(transport), Node(diloco.open_hub(f"me/none{i}"))
        a.send(1)
        assert master.sync_once() == 1 and master.state.bucket == ""
    # a running swarm keeps its bucket: who cannot use it is told, and not taken for one without
    state = copy.deepcopy(master.state)
    state.bucket = "me/x-swarm"
    transport.commit({diloco.STEP: state.content()})
    monkeypatch.undo()
    with pytest.raises(diloco.Refused, match="buckets need Xet: unset HF_HUB"):
        diloco.open_hub(f"me/none{i}").read(diloco.STEP)
    for bad in ("swarm", "a/b/c", "http://x/y"):
        with pytest.raises(ValueError, match="distributed.bucket"):
            diloco.open_hub("me/none0", bucket=bad)


# ---- master.py and worker.py, as processes
# - killed at any time, a swarm ends with balanced books; its end is that of the mean progress
# - two nodes learn more than one machine alone; what they leave is read, exported, gone on with
# - a worker waits for its master, keeps the flags of its first start, and ends at a signal


def start(script, *flags, cwd, log):
    with open(cwd / log, "a") as out:
        PROCESSES.append(subprocess.Popen(
            [sys.executable, HERE / script, *flags], cwd=cwd, stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"}))
    return PROCESSES[-1]


MASTER = ["--config=smoke", "--inner-steps=10", "--max-steps=120", "--poll-interval=0.1",
          "--round-timeout=2", "--device=cpu", "--eval-every=60", "--lr=2e-3",
          "--checkpoint.every-steps=30"]


def books(cwd):
    return json.loads((cwd / "runs/hub/global/step_count.json").read_text())["nodes"]


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def start_worker(name, cwd, *flags):
    return start("worker.py", f"--node-id={name}", "--device=cpu", *flags, cwd=cwd,
                 log=f"{name}.log")


def test_a_swarm_of_killed_processes_keeps_its_books(tmp_path):
    begin = {"m": lambda: start("master.py", *MASTER, cwd=tmp_path, log="m.log"),
             "a": lambda: start_worker("a", tmp_path, "--checkpoint.every-steps=15"),
             "b": lambda: start_worker("b", tmp_path, "--checkpoint.every-steps=15")}
    running, chance = {name: begin[name]() for name in begin}, random.Random(0)
    for name in "mbamb":
        time.sleep(chance.uniform(2.0, 4.5))
        if running[name].poll() is None:
            running[name].kill()
            running[name].wait()
            running[name] = begin[name]()
    for name in "abm":
        assert running[name].wait(timeout=PATIENCE) == 0, (tmp_path / f"{name}.log").read_text()
    assert "finished" in (tmp_path / "m.log").read_text()
    merged = [m for line in history_of(diloco.FolderTransport(tmp_path / "runs/hub"))
              for m in line.get("merged", ())]
    steps = [(m["node"], m["local_step"]) for m in merged]
    assert len(steps) == len(set(steps)), "nothing is merged twice"
    for name, entry in books(tmp_path).items():
        assert sum(m["steps"] for m in merged if m["node"] == name) == entry["steps"]
        # a node that is killed before its first checkpoint joins anew, at the swarm's step; one
        # that is killed with its last delta on the hub has no more to send
        assert entry["steps"] + entry["lost"] <= entry["local_step"]
        assert entry["final"] or entry["local_step"] == last_step(tmp_path / f"runs/smoke/{name}")
    # the end is that of the mean progress, which a node learns of with a delay
    assert sum(entry["local_step"] for entry in books(tmp_path).values()) <= 280


def test_a_swarm_learns_more_than_one_machine_alone_and_ends_cleanly(tmp_path, monkeypatch, capfd):
    """The demo of the README: three terminals, the default folder."""
    monkeypatch.chdir(tmp_path)
    flags = ["--config=smoke", "--max-steps=240", "--eval-every=120", "--device=cpu"]
    workers = [start_worker(name, tmp_path) for name in "ab"]
    _, alone = train_main(capfd, *flags, "--name=alone")
    alone = float(re.findall(r"val ([\d.]+)", alone)[-1])
    for name in "ab":           # both wait for the master, so that they begin together
        wait_for(lambda: "waiting  for a global" in (tmp_path / f"{name}.log").read_text())
    master = start("master.py", *flags, "--inner-steps=10", cwd=tmp_path, log="m.log")
    assert [process.wait(timeout=PATIENCE) for process in (*workers, master)] == [0, 0, 0]
    log = (tmp_path / "a.log").read_text()
    assert [word for word in ("waiting", "join", "push", "install", "eval", "checkpoint")
            if f"\n{word}" not in "\n" + log] == []
    assert "--export=DIR" in (tmp_path / "m.log").read_text()
    hub = diloco.FolderTransport(tmp_path / "runs/hub")
    state = diloco.parse_state(hub.read(diloco.STEP)[1])
    assert state.keyframe == state.outer_step and state.finished
    assert state.val[-1][0] == state.outer_step and state.val[-1][2] < alone, (state.val, alone)
    before = hub.head()
    assert master_script.main(["--status"]) is None
    table = f"| outer step {state.outer_step} | step {state.progress} | 2 nodes"
    assert table in capfd.readouterr().out
    assert master_script.main(["--export=out"]) is None and (tmp_path / "out/config.json").exists()
    assert hub.head() == before, "they only read"
    assert same(load_file(tmp_path / "runs/hub/global/latest.safetensors"),
                load_file(tmp_path / "out/model.safetensors"))
    assert worker_script.main(["--node-id=a"]) is None
    assert "already at step" in capfd.readouterr().out
    master_script.prepare(["--device=cpu"]).run()
    assert "finished" in capfd.readouterr().out


def test_a_worker_started_again_keeps_the_flags_of_its_first_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    master_script.prepare([*MASTER, "--max-steps=10"])
    first = ["--node-id=a", "--device=cpu", "--lr=0.01", "--checkpoint.keep-last=1"]
    worker_script.prepare(first).train()
    capsys.readouterr()
    again = worker_script.prepare(["--node-id=a", "--lr=0.02"])
    assert capsys.readouterr().out.startswith(
        "notice   as at the first start: --run.device=cpu --checkpoint.keep_last=1\n")
    config = again.config
    assert (config["optimizer"]["lr"], config["checkpoint"]["keep_last"]) == (0.02, 1)
    assert config["run"]["max_steps"] == 10 and config["distributed"]["inner_steps"] == 10


@pytest.mark.parametrize("message, status", [("None", 0), ("'no such hub'", 2)])
def test_a_program_ends_well_while_a_job_is_inside_of_torch(message, status):
    code = f"""
import time, torch, config, diloco
def work():
    while True:
        diloco.decode(diloco.encode({{"w": torch.randn(300, 300)}}, "int4"), {{"w": (300, 300)}})
diloco.Job(work)
time.sleep(0.3)
print("the end")
config.end({message})"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout) == (status, "the end\n"), done.stderr
    assert done.stderr == ("no such hub\n" if status else "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_worker_that_waits_and_one_that_trains(tmp_path, number):
    worker, log = start_worker("a", tmp_path), tmp_path / "a.log"
    wait_for(lambda: "waiting  for a global model" in log.read_text())
    worker.send_signal(number)
    assert worker.wait(timeout=PATIENCE) == 0 and "Traceback" not in log.read_text()
    master = start("master.py", *MASTER, "--max-steps=100000", cwd=tmp_path, log="m.log")
    worker = start_worker("a", tmp_path)
    wait_for(lambda: "\npush" in log.read_text())
    worker.send_signal(number)
    assert worker.wait(timeout=PATIENCE) == 0
    assert f"{number.name}: the state is saved" in log.read_text()
    wait_for(lambda: "a" in books(tmp_path))
    master.send_signal(number)
    assert master.wait(timeout=PATIENCE) == 0
    entry = books(tmp_path)["a"]
    assert entry["steps"] == entry["local_step"] and entry["lost"] == 0


def test_a_worker_waits_and_says_so_and_a_swarm_runs_over_the_hub(hub, tmp_path):
    repo, log = f"me/live{len(hub.repos)}", tmp_path / "a.log"
    worker = start_worker("a", tmp_path, f"--hub={repo}")
    wait_for(lambda: f"waiting  for {repo}" in log.read_text())
    master = run_script([f"--hub={repo}", *MASTER, "--max-steps=40", "--max-outer-steps=1"],
                        tmp_path, "master.py")
    assert master.returncode == 0 and "round       1" in master.stdout, master.stderr
    assert worker.wait(timeout=PATIENCE) == 0, log.read_text()
    pushed = lines_of(tmp_path / "runs/smoke/a", "push")
    assert sum(p["steps"] for p in pushed) == pushed[-1]["step"] <= 40
    assert lines_of(tmp_path / "runs/smoke/a", "join")[0] == {
        "event": "join", "outer_step": 0, "step": 0}

# ---- python test_all.py: the study of the README


STUDY = ["--config=smoke", "--max-steps=2500", "--inner-steps=25", "--lr=4e-3", "--warmup-steps=50",
         "--micro-batch-size=16", "--eval-batches=64", "--sample=", "--logging.every-steps=1000",
         "--checkpoint.every-steps=0"]
LATENCY = 10.0      # of each up- and download, s
CLOCK = (1350, 1800)    # s


def val_loss(model, config) -> float:
    return trainer_module.mean_loss(model, build_data(config)[1], config, torch.device("cpu"))


def loss_alone(config) -> float:
    """Validation loss after a run on one machine."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        config["run"]["output_dir"] = folder
        torch.manual_seed(config["run"]["seed"])
        trainer = Trainer(build_model(config["model"]), config, build_data(config)[0])
        trainer.train()
    return val_loss(trainer.model, config)


def loss_of_swarm(config, speeds, **world) -> tuple:
    """(its master, validation loss of what it has published) of a simulated swarm."""
    with contextlib.redirect_stdout(None):
        master, _ = simulate(config, speeds, **world)
    model = build_model(config["model"])
    diloco.set_tensors(diloco.swarm_tensors(model), master.weights)
    return master, val_loss(model, config)


def clock(nodes: int, seed: int, *flags: str):
    """Prints the validation loss of what a swarm has published after so many seconds of virtual
    time, against data parallel on as many samples."""
    speeds = (SPEEDS * nodes)[:nodes]
    for seconds in CLOCK:
        # the learning rate ends with the clock: the last delta takes two or three loops to return
        steps = int(statistics.mean(speeds) * (seconds - 6 * LATENCY))
        common = [*STUDY, f"--seed={seed}", f"--max-steps={steps}", *flags]
        config = load_config(common)
        master, loss = loss_of_swarm(config, speeds, latency=LATENCY, seconds=seconds)
        merged = sum(entry.steps for entry in master.state.nodes.values())
        batch = nodes * config["data"]["target_batch_size"]
        alone = loss_alone(load_config([*common, f"--target-batch-size={batch}",
                                        f"--max-steps={round(merged / nodes)}"]))
        print(json.dumps({"nodes": nodes, "seed": seed, "seconds": seconds, "steps": merged,
                          "rounds": master.state.outer_step, "ended": master.state.finished,
                          "swarm": round(loss, 4), "data parallel": round(alone, 4),
                          "excess, %": round(100 * (loss / alone - 1), 2)}), flush=True)


def study(nodes: int, seed: int, only: str = "", *flags: str):
    """Prints the validation loss after 2,500 steps of the mean node: data parallel, one node alone,
    a swarm of equal nodes that wait for each other, a swarm as it is. `only`: one of these rows.

    What is known, as validation loss or as the excess over data parallel. 2026-11 is the protocol
    before: it published the whole model each round, and each node ended by itself.

    2026-12  4 nodes, int4, seed 1, as it is: 1.3511
    2026-12  that, before short first loops, seeds 1, 2 (2026-11): 1.3459 1.3759 (1.3480 1.3815)
    2026-12  that, before loops by time, seeds 1, 2 (2026-11): 1.3644 1.3932 (1.3480 1.3815)
    2026-12  4 nodes, int2, seeds 1, 2 (2026-11): 1.3658 1.3721 (1.3499 1.3643)
    2026-12  4 nodes, seed 11, 1,000 steps, about 1,350 s; data parallel 1.4949
    2026-12  loops of 18 steps (25; 12) for every node: 1.5553 (1.5796; 1.5585)
    2026-12  that: no latency; fp32; mean of the last 5 models: 1.5324; 1.5573; 1.5508
    2026-12  that: looks ahead 0, 0.5, 1.3 times as far: 1.6642 1.5731 1.5942
    2026-12  loops of 33 s for every node (20 s; 25 s): 1.5406 (1.5505; 1.5430)
    2026-12  that: nodes in step by an ideal clock: 1.5386
    2026-12  that: no latency, share that stays 0, 0.24: 1.5153 1.5324
    2026-12  that: latency 5 s, share that stays 0, 0.26, 0.53: 1.5478 1.5249 1.5240
    2026-12  that: latency 10 s, share that stays 0.5; outer lr 0.5: 1.5396; 1.5436
    2026-12  that: outer momentum falls over the last 3 rounds (8): 1.5296 (1.5356)
    2026-12  that: then the mean of the last 5 models gains nothing: 1.5339
    2026-12  that: in step by what deltas have waited, seeds 11 to 13: 1.5382 1.5293 1.5357
    2026-12  as it is, loops of a tenth until the paces are known: 1.5308 1.5224 1.5172 (of a fifth,
             seed 13: 1.5208; the first whole loops scaled down as outsized: 1.5219 1.5207 1.5189)
    2026-12  16 nodes, seed 11, as it is (before short first loops): 1.5155 (1.5151), 1,800 s 1.4313
             (1.4286)
    2026-12  4 nodes, seeds 12, 13: loops of 33; of 20; of 15: 1.5380 1.5402; 1.5090 1.5124; 1.5184
             1.5253
    2026-12  that, seeds 12, 13: at most 0.6 stays; loops grow from 0.4 over 12 rounds; shrink to
             0.4 over the last 10: 1.5191 1.5301; 1.5266 1.5301; 1.5203 1.5155
    2026-12  that, seeds 12, 13: what stays grows over the first 20 rounds: 1.5288 1.5377
    2026-12  before: the first loop has 2 steps; loops grow over 4 rounds: 1.5378 1.5236 1.5293;
             1.5361 (seed 13: 1.5284)
    2026-12  with loops of 5 steps until the paces are known, seeds 11, 12: 1.5290 1.5250
    2026-12  with these: outer lr 0.85; momentum warms up in 14 rounds, falls in 4.5: 1.5253 1.5225;
             1.5479 1.5295; 1.5306 1.5262
    2026-12  before: without coming into step; loops of 35: 1.5426; 1.5615
    2026-12  that: 11 rounds of 100 steps (three quarters stay from the first): 1.6953 (2.0421)
    2026-12  synchronous, unequal speeds, no latency, 2,013 s: 1.5085
    2026-11  4 nodes (8), three seeds: +0.6 % (+2.3 %)
    2026-11  the same: each global model is followed in full: +1.6 % (+3.4 %)
    2026-11  that, seed 1: momentum 0.8 over 10 rounds: +1.5 % (+3.3 %)
    2026-11  that, seed 1: finished nodes leave the average: +4.6 %
    2026-11  that, seed 1: the lr follows each node's own steps: +2.2 %
    2026-11  that, seed 1: both, and no look ahead: +6.1 %
    2026-11  4 nodes, seed 2: follows all, half, a quarter, none of an error: 1.406 1.390 1.382
             1.654
    2026-11  4 equal nodes, latency 40 %, 80 % of a loop: a quarter (all): 1.380 (1.437), 1.404
    2026-11  3 equal nodes, 25 rounds of 100 steps: as it is; all; a quarter from round 1: 1.409
             1.427 1.449
    2026-11  4 nodes, 41 rounds: momentum 0.9 over 20, 0.8 over 10: 1.522 1.526
    2026-11  loops of 10 steps; of 5: momentum 0.9 (0.8; 0.6): 1.874 (1.858); 1.886 (1.819)
    2026-11  8 nodes, seed 2, 1.377 as it was: rounds of six; momentum 0.95; lower lr: 1.396
             1.410 1.376
    2026-11  the same: own delta counted 1.33, 0.6 times; mean of four points of a loop: 1.401
             1.380 1.374
    2026-11  4 nodes, seed 2, 1.406 as it was: one delta in flight at a time; two rounds ahead:
             1.412 1.412
    2026-11  a node that joins at half time, seeds 1 to 3: change by its first delta: -0.0191
             -0.0305 -0.0026
    2026-11  against asynchronous local SGD (Liu et al. 2024): loops by each node's speed:
             1.445, not 1.409
    2026-11  against eager updates: own delta at 1/K at once: 2.1 to 2.2
    """
    common, rounds = [*STUDY, f"--seed={seed}", *flags], 0
    size = load_config(common)["data"]["target_batch_size"]
    for what, more in (("data parallel", [f"--target-batch-size={nodes * size}"]),
                       ("one node alone", []), ("synchronous", ["--wait=true", "--codec=fp32"]),
                       ("asynchronous", [])):
        if only not in ("", what):
            continue
        config = load_config([*common, *more])
        if what in ("synchronous", "asynchronous"):
            world = (dict(speeds=[1.0] * nodes) if more else
                     dict(speeds=(SPEEDS * nodes)[:nodes], latency=LATENCY))
            master, loss = loss_of_swarm(config, **world)
            rounds = master.state.outer_step
        else:
            loss = loss_alone(config)
        print(json.dumps({"nodes": nodes, "seed": seed, "what": what, "rounds": rounds,
                          "loss": round(loss, 4)}), flush=True)


def real_run(steps: int = 1400, inner_steps: int = 56, latency: float = 1.0, more: tuple = ()):
    """Master and three workers as processes over a loopback Hub, 1 s and 1 MB/s away, then three
    alone: prints validation losses, token rates and the bytes at the Hub."""
    flags = ["--config=small", "--d-model=128", f"--max-steps={steps}", "--lr=4e-3",
             "--micro-batch-size=8", "--target-batch-size=8", "--precision=fp32", "--eval-every=0",
             "--sample=", "--warmup-steps=50", *more]
    own = ["--device=cpu", "--logging.every-steps=50", "--checkpoint.every-steps=0"]
    names, server = ["a", "b", "c"], LoopbackHub()
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        os.environ |= {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_test", "HF_HOME": folder,
                       "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        server.latency, server.rate = latency, 1e6
        config = load_config([*flags, "--eval-batches=64"])
        model = build_model(config["model"])

        def rates(where):
            last = [lines_of(cwd / where.format(name), "step")[-1] for name in names]
            return [line["tokens"] / line["seconds"] for line in last]

        def state():
            return json.loads(server.objects[server.at("me/swarm")[1][diloco.STEP]])

        def val_loss(weights):
            diloco.set_tensors(diloco.swarm_tensors(model), weights)
            return round(trainer_module.mean_loss(model, build_data(config)[1], config,
                                                  torch.device("cpu")), 4)

        def run_of(where):
            file = next((cwd / where).glob("step_*.pt"))
            return val_loss(torch.load(file, weights_only=True)["model"])
        master = start("master.py", "--hub=me/swarm", f"--inner-steps={inner_steps}",
                       "--commits-per-hour=0", *flags, cwd=cwd, log="master.log")
        try:
            wait_for(lambda: "waiting for deltas" in (cwd / "master.log").read_text())
            server.bytes.clear()
            workers = [start("worker.py", "--hub=me/swarm", f"--node-id={name}", *own,
                             cwd=cwd, log=f"{name}.log") for name in names]
            assert [w.wait() for w in workers] == [0, 0, 0], (cwd / "a.log").read_text()
            assert master.wait() == 0
        finally:
            print((cwd / "master.log").read_text(), flush=True)
            master.kill()
        weights = cwd / "weights"
        weights.write_bytes(server.objects[server.at("me/swarm")[1][diloco.WEIGHTS]])
        rounds, size = state()["outer_step"], sum(p.numel() for p in model.parameters())
        pushed = [p for name in names for p in lines_of(cwd / "runs/small" / name, "push")]
        print(json.dumps({
            "swarm": val_loss(load_file(weights)), "rounds": rounds, "parameters": size,
            "nodes": [run_of(f"runs/small/{name}") for name in names],
            "bytes to the Hub": server.bytes["in"], "bytes from the Hub": server.bytes["out"],
            # what the nodes send goes out again, to the master
            "a node's both ways, per parameter and round":
                round(server.bytes["out"] / len(names) / rounds / size, 2),
            "bytes of a delta": sum(p["bytes"] for p in pushed) / len(pushed),
            "seconds to send it": sum(p["seconds"] for p in pushed) / len(pushed)}), flush=True)
        alone = [start("train.py", *flags, *own, "--name=alone", f"--node-id={name}", cwd=cwd,
                       log=f"{name}.log") for name in names]
        assert [p.wait() for p in alone] == [0, 0, 0]
        print(json.dumps({
            "alone": [run_of(f"runs/alone/{name}") for name in names],
            "token rate of the swarm's nodes against these":
                [round(a / b, 3) for a, b in zip(rates("runs/small/{}"), rates("runs/alone/{}"))]}))


# ---- python test_all.py crowd: many nodes, and the Hub's limit of commits


def crowd(nodes: int, bucket: str, hours: int = 6) -> dict:
    """A swarm of tiny models in virtual time, inner loops of five to ten minutes, 100 commits an
    hour for all: what an hour brings."""
    hub, settings = Memory(limited=True), {
        **SWARM, "round_timeout": 0.0, "poll_interval": 60.0, "outer_momentum": 0.5,
        "inner_steps": 1, "commits_per_hour": 100}
    hub.bucket, pushes = bucket, []

    class Near(Far):        # a worker's view: with a bucket it makes no commits
        limited = not bucket

        def commit(self, *args, **kwargs):
            pushes.append(clock.now)
            return super().commit(*args, **kwargs)
    with virtual_time() as clock:
        master = diloco.MasterOuterLoop(hub, settings, diloco.swarm_tensors(Net()), {},
                                        log=lambda line: None)

        def work(i):
            node = Node(Near(hub, 1.0), f"n{i}", threads=True, **settings)
            while clock.now < 3600 * hours:
                node.train()
                clock.sleep(300 * (1 + i % 3 / 2))
                node.node.after_step(node)

        def end():
            clock.sleep(3600 * hours)
            master.stop = True
        clock.run(master.run, end, *[functools.partial(work, i) for i in range(nodes)])
    merged = [entry for line in history_of(hub) for entry in line.get("merged", ())]
    steps = sum(entry.local_step for entry in master.state.nodes.values())
    in_bucket = len(pushes) if bucket else 0
    return {"nodes": nodes, "bucket": bool(bucket),
            "rounds an hour": round(master.state.outer_step / hours, 1),
            "commits an hour": round((len(hub.commits) - in_bucket) / hours, 1),
            "deltas an hour": round(len(merged) / hours, 1),
            "steps of a delta": round(steps / len(merged), 1),
            "state, bytes": len(hub.files[diloco.STEP]),
            # two requests of a second for a delta of the repository, one for one of the bucket
            "seconds to fetch a round's deltas": round(
                (1 if bucket else 2) * len(merged) / master.state.outer_step / 8, 1)}


# ---- python test_all.py bench: speed on whatever device is here


BENCH = {   # what: (flags, microbatches: on a CPU, on a GPU)
    "small": (["--config=small"], 16, 64),
    "124M": (["--config=gpt2"], 1, 16),
}


def step_flops(c: dict, samples: int) -> float:
    """Model flops of a training step, 2 for a product and its sum, as in PaLM (Chowdhery et al.
    2022, appendix B): 6 a token for each number in a matrix, the output's included; and
    6 n_layer T d for attention, which is causal and so needs half of 12."""
    T, layers, width = c["block_size"], c["n_layer"], c["d_model"]
    queries, keys = c["n_head"] * c["head_dim"], c["n_kv_head"] * c["head_dim"]
    matrices = width * (2 * queries + 2 * keys + 3 * c["d_ff"])
    numbers = layers * matrices + c["vocab_size"] * width
    return samples * T * (6 * numbers + 6 * layers * T * queries)


def wait_for_device(device):
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def memory_used(device) -> float:
    """The most memory that was in use, in GB: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def seconds_of(works: dict, device, least: float = 5.0) -> dict:
    """{name: median seconds} of the works, taken in turn for about `least` seconds each, so that
    what else the machine does hits all alike."""
    times = {name: [] for name in works}
    for name, work in works.items():
        work()          # warm
    begun = time.perf_counter()
    while time.perf_counter() - begun < least * len(works) or len(times[name]) < 3:
        for name, work in works.items():
            wait_for_device(device)
            before = time.perf_counter()
            work()
            wait_for_device(device)
            times[name].append(time.perf_counter() - before)
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def plain_layers():
    """torch's own layers in place of the kernels of model.py, and a loss that holds the logits."""
    def loss(hidden, weight, labels, needs_grad):
        return F.cross_entropy((hidden @ weight.to(hidden.dtype).t()).float(), labels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "plain", lambda x: True)
        patch.setattr(model_module, "ChunkedCrossEntropy", types.SimpleNamespace(apply=loss))
        yield


def bench():
    """Prints the peak of a matrix product, and for two shapes the speed of a training step in the
    precision that training takes, its share of that peak (model flops, step_flops), its memory, and
    what the loss and attention take of it."""
    config = load_config(["--config=small"])
    device = trainer_module.pick_device("auto")
    wanted = "auto" if device.type == "cuda" else config["run"]["precision"]
    dtype, why = trainer_module.pick_precision(wanted, device)
    trainer_module.keep_freed_memory()
    n = 2048 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    peak = 2 * n ** 3 / seconds_of({"product": lambda: a @ a}, device)["product"]
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(f"device   {device}{threads}, {str(dtype)[6:]} ({why}), torch {torch.__version__}\n"
          f"peak     {peak / 1e12:.2f} TFLOP/s, a product of two {n} x {n} matrices", flush=True)
    for name, (flags, on_cpu, on_gpu) in BENCH.items():
        samples = on_cpu if device.type == "cpu" else on_gpu
        try:
            bench_shape(name, load_config(flags), samples, dtype, peak)
        except (RuntimeError, MemoryError) as e:
            if not trainer_module.out_of_memory(e):
                raise
            print(f"{name:<8} {samples} samples a step do not fit into the memory", flush=True)


def bench_shape(name: str, config: dict, samples: int, dtype, peak: float):
    device = trainer_module.pick_device("auto")
    torch.manual_seed(0)
    model = build_model(config["model"]).to(device)
    optimizer, = trainer_module.build_optimizers(model, config["optimizer"], device)
    c, half = model.config, dtype != torch.float32
    ids = torch.randint(c["vocab_size"], (samples, c["block_size"]), device=device)

    def step(run=model):
        with torch.autocast(device.type, dtype, enabled=half):
            loss = run(ids, labels=ids.roll(-1, 1))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def plain_step():
        with plain_layers():
            step()
    hidden = torch.randn(ids.numel(), c["d_model"], device=device, dtype=dtype, requires_grad=True)
    heads = torch.randn(3, samples, c["n_head"], c["block_size"], c["head_dim"], device=device,
                        dtype=dtype, requires_grad=True)

    def loss_alone():
        ChunkedCrossEntropy.apply(hidden, model.lm_head.weight, ids.flatten(), True).backward()
        optimizer.zero_grad()

    def attention_alone():
        for _ in range(c["n_layer"]):
            model_module.attend(*heads, None).sum().backward()
    works = {"step": step, "loss": loss_alone, "attention": attention_alone}
    if device.type == "cpu":
        works["plain torch layers"] = plain_step
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    count, memory = sum(p.numel() for p in model.parameters()), memory_used(device)
    print(f"{name:<8} {count / 1e6:.1f}M parameters, {samples} x {c['block_size']} tokens a step, "
          f"{memory:.1f} GB at most", flush=True)
    if device.type != "mps":
        works["compiled"] = functools.partial(step, torch.compile(model))
        try:
            works["compiled"]()
        except Exception as e:      # no compiler, no Triton: training goes on without it, too
            print(f"         --compile fails here: {trainer_module.one_line(e)[:70]}", flush=True)
            del works["compiled"]
            optimizer.zero_grad()
    seconds = seconds_of(works, device)
    for work, label in (("step", "a step"), ("compiled", "with --compile"),
                        ("plain torch layers", "with plain torch layers")):
        if work in seconds:
            share = step_flops(c, samples) / seconds[work] / peak
            print(f"         {label:<24} {1e3 * seconds[work]:8.1f} ms "
                  f"{ids.numel() / seconds[work]:9,.0f} tok/s {share:6.1%} of the peak "
                  f"{seconds[work] / seconds['step']:6.2f} x a step", flush=True)
    for work in ("loss", "attention"):
        print(f"         {work:<24} {1e3 * seconds[work]:8.1f} ms "
              f"{seconds[work] / seconds['step']:36.1%} of a step", flush=True)


# ---- python test_all.py size: what a swarm costs


SHAPES = {
    "10M": ["--config=small", "--n-layer=8", "--d-model=320", "--n-head=5"],
    "124M": ["--config=gpt2", "--block-size=64", "--num-workers=0"],
}


class Watch(threading.Thread):
    """The peak of a process's anonymous memory in MB: mapped files do not count, the system can
    drop them."""

    def __init__(self, process):
        super().__init__(daemon=True)
        self.process, self.peak = process, 0
        self.start()

    def run(self):
        status = Path(f"/proc/{self.process.pid}/status")
        while self.process.poll() is None:
            with contextlib.suppress(OSError, TypeError):       # it has ended just now
                found = re.search(r"RssAnon:\s*(\d+)", status.read_text())
                self.peak = max(self.peak, int(found[1]) // 1024)
            time.sleep(0.005)


def feed(hub, state, shapes, step: int, nodes: int = 8) -> int:
    """Send one delta each of `nodes` nodes, in int4, in one commit, so that one round merges them
    all. Returns the bytes of one."""
    torch.manual_seed(step)
    stored = diloco.encode({k: torch.randn(shape) * 1e-3 for k, shape in shapes.items()}, "int4")
    with tempfile.TemporaryDirectory() as folder:
        add = {f"nodes/n{i}/delta_{step}.safetensors": Path(folder, f"n{i}") for i in range(nodes)}
        for i, file in enumerate(add.values()):
            delta = diloco.Delta(run_id=state.run_id, node_id=f"n{i}", incarnation="1",
                                 local_step=step, base_outer_step=state.outer_step, steps=1,
                                 tokens=64, loss=5.0, codec="int4", seconds=30.0)
            diloco.save(stored, file, delta.header())
        hub.commit(add)
        return file.stat().st_size


def size():
    """For two shapes: bytes a parameter and round, counted at a loopback Hub; peak memory of a
    master with eight nodes and of a worker; seconds of a round."""
    server, home = LoopbackHub(), tempfile.TemporaryDirectory()
    # the client reads these once
    os.environ |= {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_test", "HF_HOME": home.name,
                   "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    for name, flags in SHAPES.items():
        flags = [*flags, "--data.path=stdlib", "--micro-batch-size=1", "--target-batch-size=1",
                 "--eval-batches=1", "--sample=", "--device=cpu", "--precision=fp32",
                 "--eval-every=1", "--max-steps=100000"]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(name, flags, server, Path(folder))), flush=True)


def measure(name: str, flags: list, server, cwd: Path) -> dict:
    shapes = diloco.shapes_of(diloco.swarm_tensors(build_model(load_config(flags)["model"])))
    count = sum(math.prod(shape) for shape in shapes.values())
    log, processes, up, down = cwd / "master.log", [], [], []

    def launch(*flags):
        processes.append(start(*flags, cwd=cwd, log=flags[0].replace(".py", ".log")))
        return Watch(processes[-1])
    try:
        master = launch("master.py", f"--hub=me/{name}", "--keyframe-every=2", "--round-timeout=1",
                        "--commits-per-hour=0", *flags)
        wait_for(lambda: "waiting for deltas" in log.read_text())
        hub = diloco.open_hub(f"me/{name}")
        before = diloco.read_state(hub)[1]
        for step in (1, 2):     # an update alone, and one with a keyframe
            delta = feed(hub, before, shapes, step)
            server.bytes.clear()
            wait_for(lambda: f"round    {step:4d}" in log.read_text())
            time.sleep(3)       # its listing; the evaluation
            up.append(server.bytes["in"])
            server.bytes.clear()
            at, state = diloco.read_state(hub)
            diloco.fetch_global(hub, at, state, cwd / "in", shapes, before)
            down.append(server.bytes["out"])
            before = state
        peak = master.peak       # with eight nodes
        worker = launch("worker.py", f"--hub=me/{name}", "--node-id=w", "--device=cpu",
                        "--inner-steps=1", "--checkpoint.every-steps=0", "--logging.every-steps=1")
        wait_for(lambda: (cwd / "worker.log").read_text().count("\ninstall") >= 3)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {"shape": name, "parameters": count,
            "bytes a parameter and round": {
                # one round in ten has a keyframe
                "master up": round((up[0] + (up[1] - up[0]) / 10) / count, 2),
                "worker up": round(delta / count, 2),
                "worker down": round(sum(down) / 2 / count, 2)},
            "peak MB, and bytes a parameter beside 500 MB": {
                who: (mb, round((mb - 500) / count * 2**20, 1))
                for who, mb in (("master, 8 nodes", peak), ("worker", worker.peak))},
            "seconds of a round, and of one with a keyframe": [
                float(s) for s in re.findall(r"round.* ([\d.]+) s\n", log.read_text())[:2]]}


# ---- python test_all.py: the tests, on all cores


def test_the_programs_behind_the_figures_run():
    done = run_python("-c", """
import json
import test_all as t
small = ["--config=smoke", "--d-model=32", "--block-size=16", "--data.path=synthetic"]
t.STUDY += [*small, "--warmup-steps=1", "--eval-batches=1"]
t.BENCH, t.SHAPES, t.CLOCK = {"small": (small, 1, 1)}, {"small": small}, (70, 80)
t.seconds_of.__defaults__ = (0.0,)
t.torch.compile = lambda model: None        # as without a compiler
t.clock(2, 1)
t.study(2, 1, "", "--max-steps=50")
print(json.dumps(t.crowd(2, "", 1)))
t.bench()
t.size()
t.real_run(60, 10, 0.1, (*small[1:], "--eval-batches=1"))""")
    assert done.returncode == 0, done.stderr + done.stdout
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    *clock, together, alone, _, swarm, crowd, size, real, _ = found
    assert [line["seconds"] for line in clock] == [70, 80]
    assert {line["what"] for line in (together, alone, swarm)} == {
        "data parallel", "one node alone", "asynchronous"}
    assert crowd["deltas an hour"] > 0 and size["bytes a parameter and round"]["worker up"] > 0.5
    assert real["rounds"] > 0 and len(real["nodes"]) == 3 and real["bytes of a delta"] > 0
    assert "--compile fails here" in done.stdout and "% of the peak" in done.stdout


class Share:
    """A plugin of pytest: every n-th test, from the i-th on."""

    def __init__(self, i: int, n: int):
        self.i, self.n = i, n

    def pytest_collection_modifyitems(self, items):
        items[:] = items[self.i::self.n]


def run_tests() -> int:
    """All tests, dealt out to a process a core; what each of them prints comes at its end. Returns
    the exit status."""
    n = min(4, os.cpu_count() or 1)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    shares = [subprocess.Popen([sys.executable, __file__, "share", str(i), str(n)], env=env,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
              for i in range(n)]
    with ThreadPoolExecutor(n) as pool:
        for out, _ in pool.map(subprocess.Popen.communicate, shares):
            print(out, end="", flush=True)
    return max(abs(share.returncode) for share in shares)


if __name__ == "__main__":  # bench, size, hub, crowd, [clock] NODES SEED [a row]; else the tests
    if not sys.argv[1:]:
        sys.exit(run_tests())
    elif sys.argv[1] == "share":
        sys.exit(pytest.main(["-q", __file__], [Share(int(sys.argv[2]), int(sys.argv[3]))]))
    elif sys.argv[1:] == ["hub"]:
        real_run()
    elif sys.argv[1:] == ["size"]:
        size()
    elif sys.argv[1:] == ["bench"]:
        bench()
    elif sys.argv[1:] == ["crowd"]:
        for count, where in itertools.product((4, 50, 64, 256), ("", "me/bucket")):
            print(json.dumps(crowd(count, where)), flush=True)
    elif sys.argv[1:2] == ["clock"]:
        clock(int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    else:
        study(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
