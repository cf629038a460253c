"""
All tests, in the order of the files: config, model, data, trainer, scripts.

    python -m pytest -q test_all.py

No network, no GPU, nothing left behind. They test laws (a resumed run is the run, a permutation
permutes), and what concerns processes is tested with processes.
"""
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import config as config_module
import model as model_module
import trainer as trainer_module
from config import load_config
from model import ChunkedCrossEntropy, build_model, register_model
from trainer import Trainer, TrainingError, build_data, read_checkpoint

HERE = Path(__file__).resolve().parent
TINY = ["--config=smoke", "--device=cpu", "--data.path=synthetic", "--d-model=32",
        "--block-size=16", "--vocab-size=64", "--eval-batches=2", "--logging.every-steps=1"]


def tiny(tmp_path, *flags):
    return load_config([*TINY, f"--output-dir={tmp_path}", *flags])


def make_trainer(config, model=None, data=None, **kwargs):
    torch.manual_seed(config["run"]["seed"])
    model = model or build_model(config["model"])
    return Trainer(model, config, *(data or build_data(config)), **kwargs)


def lines_of(folder, event):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == event]


def run_script(args, cwd, **kwargs):
    return subprocess.run([sys.executable, HERE / "train.py", *args], cwd=cwd, capture_output=True,
                          text=True, timeout=240, **kwargs)

# ---- config.py


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
])
def test_flag_is_read_as_the_type_of_its_default(flag, section, key, value):
    got = load_config([flag])[section][key]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("flag, says", [
    ("--learning-rate=1", "nearest is --"), ("--optimizer.lrr=1", "nearest is --optimizer.lr"),
    ("--max-step=1", "run.max_steps"),
    ("--every-steps=5", "--checkpoint.every_steps or --logging.every_steps"),
    ("--max-steps=1e3", "whole number"),
    ("--lr=fast", "wants a number"), ("--compile=yes", "true or false"), ("--lr", "--lr=VALUE"),
    ("lr=1", "--key=value"), ("--betas=0.9", "two numbers"),
    ("--config=huge", "smoke, small, gpt2"), ("--target-batch-size=24", "not a multiple"),
    ("--n-head=3", "not divisible"), ("--n-kv-head=3", "not divisible"), ("--d-model=12", "odd"),
    ("--lr=nan", "finite"), ("--lr=-1", "not negative"), ("--lr=inf", "finite"),
    ("--betas=0.9,1.0", "below 1"), ("--betas=-0.1,0.9", "not negative"),
    ("--dropout=1", "below 1"), ("--precision=fp8", "auto, fp32, bf16, fp16"),
    ("--micro-batch-size=0", "at least 1"), ("--name=a/b", "folder name"),
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
    assert (one["data"]["accumulation"] == 30 and one["scheduler"]["max_steps"] == 20_000
            and one["model"]["d_ff"] == 2048)
    assert config_module.base["optimizer"]["lr"] == 1e-3, "a load must not change the defaults"


def test_help_shows_every_key_with_its_default_and_a_comment():
    text = config_module.help_text()
    for section, values in config_module.base.items():
        for key in values:
            assert re.search(rf"^  --{section}\.{key}=\S.*? +[a-z]+", text, re.M), \
                f"{section}.{key}"

# ---- model.py


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


def test_files_of_tied_models_load_with_and_without_the_head():
    m = build_model(SHAPE)
    state = m.state_dict()
    del state["lm_head.weight"]
    other = build_model(SHAPE)
    other.load_state_dict(state)
    assert (torch.equal(other.lm_head.weight, m.lm_head.weight)
            and other.lm_head.weight is other.model.embed_tokens.weight)


@pytest.mark.parametrize("shape", [
    SHAPE, dict(name="gpt", vocab_size=5000, d_model=768, n_head=4, n_layer=2, tie_weights=False)])
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
        monkeypatch.setattr(model_module.CPUAttention, "LONGEST", 0)
    m = build_model(SHAPE)
    one = torch.randint(0, 97, (1, 200))
    two = one.clone()
    two[:, 140:] = (two[:, 140:] + 1) % 97
    a, b = m(one)["logits"], m(two)["logits"]
    assert torch.equal(a[:, :140], b[:, :140]) and not torch.allclose(a[:, 140:], b[:, 140:])


@pytest.mark.parametrize("name, shapes", [
    ("rms_norm", [(3, 5, 8), (8,)]), ("rope", [(2, 3, 7, 8)]), ("attention", [(3, 9, 4)] * 3)])
def test_cpu_kernels_have_the_right_gradients(monkeypatch, name, shapes):
    monkeypatch.setattr(model_module.CPUAttention, "ROWS", 4)
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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    torch.manual_seed(0)
    m = build_model(SHAPE)
    ids = torch.randint(0, 97, (2, 20))
    pad, no = torch.randint(0, 97, (2, 6)), torch.zeros(2, 6, dtype=torch.long)
    order = ((lambda a, b: torch.cat((b, a), 1)) if side == "left"
             else (lambda a, b: torch.cat((a, b), 1)))
    padded, mask = order(ids, pad), order(torch.ones_like(ids), no)
    real = mask[0].bool()
    assert torch.allclose(m(padded, attention_mask=mask)["logits"][:, real], m(ids)["logits"],
                          atol=1e-5)
    labels = torch.randint(0, 97, (2, 20))
    a = m(padded, labels=order(labels, pad), attention_mask=mask)["loss"]
    assert torch.allclose(a, m(ids, labels=labels)["loss"], atol=1e-6)
    a.backward()
    assert all(p.grad.isfinite().all() for p in m.parameters())


def test_ignored_labels_and_a_batch_without_any():
    m = build_model(SHAPE)
    ids, labels = torch.randint(0, 97, (2, 30)), torch.randint(0, 97, (2, 30))
    labels[0] = -100
    assert torch.allclose(m(ids, labels=labels)["loss"], m(ids[1:], labels=labels[1:])["loss"])
    loss = m(ids, labels=torch.full_like(labels, -100))["loss"]
    loss.backward()
    assert loss == 0 and all(p.grad is None or not p.grad.any() for p in m.parameters())


def test_too_long_and_misshapen_are_refused():
    with pytest.raises(ValueError, match="301 tokens is longer than block_size 300"):
        build_model(SHAPE)(torch.zeros(1, 301, dtype=torch.long))
    for wrong in (dict(n_head=5), dict(n_kv_head=3), dict(n_head=16)):
        with pytest.raises(ValueError, match="d_model"):
            build_model({**SHAPE, **wrong})


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
    monkeypatch.setattr(ChunkedCrossEntropy, "CHUNK", 97 * 7)
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


PEAK = """
import resource, sys, torch
import model
V, D, N = 50304, 256, 4096
hidden = torch.randn(N, D, requires_grad=True)
weight = (torch.randn(V, D) / 50).requires_grad_()
labels = torch.randint(0, V, (N,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.ChunkedCrossEntropy.apply(hidden, weight, labels, True).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_large_vocabulary_holds_no_logits():
    out = subprocess.run([sys.executable, "-c", PEAK], cwd=HERE, capture_output=True, text=True,
                         timeout=120)
    # MiB, the gradient of the 50 MiB weight included; all logits are 786
    assert int(out.stdout) < 500, out.stderr


def test_registry(tmp_path, monkeypatch):
    @register_model("test_only")
    def factory(config):
        return nn.Linear(config["d_model"], 1)
    assert build_model({"name": "test_only", "d_model": 3}).in_features == 3
    del model_module.MODELS["test_only"]
    (tmp_path / "mine_for_test.py").write_text(
        "import torch\ndef make(c): return torch.nn.Linear(2, 2)\n")
    (tmp_path / "broken_for_test.py").write_text("this is no python\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert build_model({"name": "mine_for_test:make"}).in_features == 2
    for name, says in [("nope", "gpt, reference_transformer"),
                       ("no_such_module:f", "no_such_module"), ("mine_for_test:other", "other"),
                       ("broken_for_test:f", "SyntaxError"), (":", "model.name=:")]:
        with pytest.raises(ValueError, match=re.escape(says)):
            build_model({"name": name})


# ---- trainer.py: data


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 4097])
def test_a_permutation_permutes(n):
    a, b = ([trainer_module.permute(i, n, key) for i in range(n)] for key in (1, 2))
    assert sorted(a) == sorted(b) == list(range(n)) and (n < 10 or a != b)


def windows(tmp_path, tokens, *flags, dtype=np.uint16, name="data.bin"):
    (tmp_path / name).write_bytes(np.asarray(tokens, dtype).tobytes())
    return build_data(
        tiny(tmp_path, f"--data.path={tmp_path / name}", "--vocab-size=70000", *flags))


def test_an_epoch_sees_all_and_nodes_differ_and_validation_is_disjoint(tmp_path):
    tokens = np.arange(5000)
    train, val = windows(tmp_path, tokens)
    ids = torch.stack([train[i]["input_ids"] for i in range(len(train))])
    assert (len(train) == 4499 // 16
            and torch.equal(train[7]["input_ids"][1:], train[7]["labels"][:-1]))
    assert len(ids.unique()) > 0.99 * 4500 and ids.max() < 4500
    assert min(val[i]["input_ids"].min() for i in range(len(val))) >= 4500
    again, _ = windows(tmp_path, tokens)
    other, _ = windows(tmp_path, tokens, "--node-id=b")
    assert all(torch.equal(train[i]["labels"], again[i]["labels"]) for i in (0, 3, 1000, 10**9))
    assert sum(torch.equal(train[i]["labels"], other[i]["labels"]) for i in range(50)) < 10
    first, second = ([tuple(train[i]["labels"].tolist())
                      for i in range(e * len(train), (e + 1) * len(train))] for e in (0, 1))
    assert first != second


def test_formats(tmp_path):
    tokens = np.arange(2000) % 250
    for name, content, vocab in [
        ("nanogpt.bin", tokens.astype("<u2").tobytes(), 256),
        ("gpt2.bin", np.array([20240520, 1, 2000] + [0] * 253, "<i4").tobytes()
         + tokens.astype("<u2").tobytes(), 256),
        ("llama3.bin", np.array([20240801, 7, 2000] + [0] * 253, "<i4").tobytes()
         + tokens.astype("<u4").tobytes(), 256),
        ("text.txt", tokens.astype("u1").tobytes(), 256),
    ]:
        (tmp_path / name).write_bytes(content)
        assert np.array_equal(
            trainer_module.open_tokens(str(tmp_path / name), vocab).read(0, 2000), tokens), name
    np.save(tmp_path / "t.npy", tokens.astype(np.int32))
    assert np.array_equal(
        trainer_module.open_tokens(str(tmp_path / "t.npy"), 256).read(5, 100), tokens[5:105])
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_text("World\n")
    (folder.parent / "a.txt").write_text("Hello ")
    (folder / "empty.txt").write_text("")
    for path in (folder.parent, f"{tmp_path}/folder/**/*.txt"):
        source = trainer_module.open_tokens(str(path), 256)
        assert (bytes(source.read(0, len(source))) == b"Hello World\n"
                and bytes(source.read(4, 4)) == b"o Wo")


def test_user_datasets_and_loaders(tmp_path):
    config = tiny(tmp_path, "--micro-batch-size=2", "--target-batch-size=4")
    data = [(torch.full((4,), i), torch.full((4,), i)) for i in range(7)]
    def take(source, position):
        return [b for b, _ in zip(
            trainer_module.batches(source, config, position, torch.device("cpu")), range(9))]

    class Mine(torch.utils.data.Dataset):
        def __len__(self):
            return 7

        def __getitem__(self, i):
            return data[i]
    for source in (Mine(), torch.utils.data.DataLoader(Mine(), batch_size=2)):
        whole, late = take(source, 0), take(source, 6)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[3:], late))
    seen = torch.cat([b[0][:, 0] for b in take(Mine(), 0)])[:14]
    assert sorted(seen[:7].tolist()) == sorted(seen[7:].tolist()) == list(range(7))

# ---- trainer.py: precision, optimizer, learning rate


def test_precision_and_device_table(monkeypatch):
    def pick(wanted, kind):
        return trainer_module.pick_precision(wanted, torch.device(kind))
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
            got, why = pick(wanted, kind)
            assert got == dtype and (wanted in why or "as asked" in why), (kind, wanted, bf16)
    assert trainer_module.pick_device("cpu").type == "cpu"
    for name in ("nonsense", "cuda:99"):
        with pytest.raises(ValueError, match="run.device"):
            trainer_module.pick_device(name)


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_tensor_is_in_one_group_and_moves(tmp_path, name, tied):
    config = tiny(tmp_path, f"--optimizer.name={name}", f"--tie-weights={tied}", "--max-steps=3")
    t = make_trainer(config)
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
    for name in ("cosine", "constant", "wsd"):
        assert lr(0, name) == 0.1 and lr(9, name) == lr(10, name) == 1.0
    assert (lr(60, "cosine") == pytest.approx(0.55)
            and lr(110, "cosine") == lr(500, "cosine") == pytest.approx(0.1))
    assert (lr(500, "constant") == 1.0 and lr(90, "wsd") == 1.0
            and lr(100, "wsd") == pytest.approx(0.55) and lr(110, "wsd") == pytest.approx(0.1))

# ---- trainer.py: the loop


def test_it_learns(tmp_path):
    t = make_trainer(tiny(tmp_path, "--max-steps=150", "--lr=1e-2"))
    t.train()
    assert t.best["val_loss"] < 2.5 < math.log(64)


def test_accumulation_equals_one_large_batch(tmp_path):
    runs = []
    for micro in (16, 4):
        t = make_trainer(
            tiny(tmp_path, f"--micro-batch-size={micro}", "--max-steps=3", f"--name={micro}"))
        t.train()
        runs.append((t, [line["loss"] for line in lines_of(t.folder, "step")]))
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-4)
               for a, b in zip(runs[0][0].model.parameters(), runs[1][0].model.parameters()))


def test_two_runs_are_equal_and_evaluation_does_not_matter(tmp_path):
    states = []
    for name, every in (("a", 0), ("b", 0), ("c", 1)):
        t = make_trainer(tiny(tmp_path, f"--name={name}", "--dropout=0.2", "--max-steps=5",
                              f"--eval-every={every}"))
        t.train()
        states.append(t.model.state_dict())
    assert all(torch.equal(states[0][k], s[k]) for s in states for k in s)


class Logits(nn.Module):
    """A model of another make; `form` says what it returns."""

    def __init__(self, form):
        super().__init__()
        self.form, self.embed, self.out = form, nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, tokens, targets=None):
        logits = self.out(self.embed(tokens))
        if self.form.startswith("logits"):
            return {"logits": logits, "logits_dict": {"logits": logits},
                    "logits_tuple": (logits, None)}[self.form]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "tuple": (loss, logits), "nanogpt": (logits, loss),
                "dict": {"loss": loss}}[self.form]


@pytest.mark.parametrize("form", ["logits", "logits_dict", "logits_tuple", "loss", "tuple",
                                  "nanogpt", "dict"])
@pytest.mark.parametrize("shape", ["dict", "tuple", "tensor"])
def test_any_model_and_any_data(tmp_path, form, shape):
    tokens = (torch.arange(17) * torch.arange(1, 41)[:, None]) % 64

    class Mine(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            ids, labels = tokens[i][:-1], tokens[i][1:]
            return {"dict": {"input_ids": ids, "labels": labels}, "tuple": (ids, labels),
                    "tensor": tokens[i]}[shape]
    torch.manual_seed(0)
    t = Trainer(Logits(form), tiny(tmp_path, "--max-steps=30", "--lr=3e-2"), Mine(),
                torch.utils.data.DataLoader(Mine(), batch_size=8))
    t.train()
    losses = [line["loss"] for line in lines_of(t.folder, "step")]
    assert losses[0] > 3.5 and losses[-1] < losses[0] - 0.5 and math.isfinite(t.best["val_loss"])


def test_token_count_follows_the_mask(tmp_path):
    class Masked(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"input_ids": torch.arange(10), "attention_mask": (torch.arange(10) < 7).long()}
    t = Trainer(build_model(tiny(tmp_path)["model"]), tiny(tmp_path, "--max-steps=2"), Masked())
    t.train()
    assert t.tokens == 2 * 16 * 7 and lines_of(t.folder, "step")[-1]["tokens"] == t.tokens
    batch = trainer_module.as_batch(
        Masked()[0] | {"input_ids": torch.arange(10)[None],
                       "attention_mask": (torch.arange(10) < 7).long()[None]})
    assert batch["labels"].tolist() == [[1, 2, 3, 4, 5, 6, -100, -100, -100, -100]]


def test_hooks_and_metrics_agree(tmp_path):
    seen = []
    t = make_trainer(tiny(tmp_path, "--max-steps=4", "--checkpoint.every-steps=2"),
                     hooks=[lambda e, p: seen.append({"event": e, **p})])
    t.train()
    assert seen == [json.loads(line)
                    for line in (t.folder / "metrics.jsonl").read_text().splitlines()]
    assert ([s["event"] for s in seen]
            == ["step"] * 2 + ["checkpoint"] + ["step"] * 2 + ["eval", "checkpoint"])
    assert set(seen[0]) == {"event", "step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s",
                            "seconds"}


def test_coordinator_is_called_and_saved(tmp_path):
    class Coordinator:
        calls = []

        def start(self, trainer):
            self.calls.append(("start", trainer.step))

        def after_step(self, trainer):
            self.calls.append(("step", trainer.step))

        def finish(self, trainer):
            self.calls.append(("finish", trainer.step))

        def state_dict(self):
            return {"calls": len(self.calls)}

        def load_state_dict(self, state):
            self.calls.append(("load", state["calls"]))
    for flags in (["--max-steps=2"], ["--max-steps=3", "--resume"]):
        make_trainer(tiny(tmp_path, *flags), coordinator=Coordinator()).train()
    assert Coordinator.calls == [("start", 0), ("step", 1), ("step", 2), ("finish", 2),
                                 ("load", 4), ("start", 2), ("step", 3), ("finish", 3)]


def test_broken_compile_falls_back(tmp_path, monkeypatch, capsys):
    def compile(model):
        def fail(*args, **kwargs):
            raise RuntimeError("no compiler\nmore")
        return fail
    monkeypatch.setattr(torch, "compile", compile)
    t = make_trainer(tiny(tmp_path, "--compile", "--max-steps=2", "--name=c"))
    t.train()
    assert ("torch.compile failed, going on without it: RuntimeError: no compiler"
            in capsys.readouterr().out)
    monkeypatch.undo()
    plain = make_trainer(tiny(tmp_path, "--max-steps=2", "--name=e"))
    plain.train()
    assert all(torch.equal(a, b) for a, b in zip(t.model.parameters(), plain.model.parameters()))


def test_the_best_is_kept_and_old_checkpoints_go(tmp_path):
    t = make_trainer(tiny(tmp_path, "--max-steps=6", "--checkpoint.every-steps=1", "--keep-last=2",
                          "--eval-every=1"))
    losses = iter([3.0, 1.0, 2.0, 2.5, 4.0, 5.0])
    t.evaluate = lambda: next(losses)
    t.train()
    assert ([p.name for p in sorted(t.folder.glob("*.pt"))]
            == ["best.pt", "step_000000000005.pt", "step_000000000006.pt"])
    best = torch.load(t.folder / "best.pt", weights_only=True)
    assert best["step"] == 2 and best["val_loss"] == 1.0
    assert (json.loads((t.folder / "latest.json").read_text())
            == {"step": 6, "path": "step_000000000006.pt"})


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_state(tmp_path):
    class Explodes(Logits):
        def forward(self, tokens, targets=None):
            return super().forward(tokens, targets) * (
                float("nan") if self.training and Explodes.now() else 1.0)
    calls = iter(range(99))
    Explodes.now = lambda: next(calls) >= 6
    t = make_trainer(tiny(tmp_path, "--checkpoint.every-steps=2"), Explodes("loss"))
    with pytest.raises(TrainingError, match="not finite near step 4.*step_000000000002.pt"):
        t.train()
    assert [p.name for p in t.checkpoints()] == ["step_000000000002.pt"]
    assert all(v.isfinite().all() for v in read_checkpoint(t.checkpoints()[0])["model"].values())
    assert all(p.isfinite().all() for p in t.model.parameters())


def test_resume_falls_back_from_a_damaged_checkpoint(tmp_path, capsys):
    flags = ["--checkpoint.every-steps=2", "--keep-last=3", "--max-steps=6"]
    done = make_trainer(tiny(tmp_path, *flags))
    done.train()
    newest, second, _ = done.checkpoints()
    newest.write_bytes(newest.read_bytes()[:-1000])
    content = bytearray(second.read_bytes())
    content[len(content) // 2] ^= 1
    second.write_bytes(content)
    t = make_trainer(tiny(tmp_path, *flags, "--resume"))
    out = capsys.readouterr().out
    assert t.step == 2 and out.count("is damaged") == 2 and "step_000000000006" in out
    t.train()
    assert all(torch.equal(a, b) for a, b in zip(t.model.parameters(), done.model.parameters()))
    for path in t.checkpoints():
        path.write_bytes(b"nonsense")
    with pytest.raises(FileNotFoundError, match="no usable checkpoint"):
        make_trainer(tiny(tmp_path, *flags, "--resume"))


def test_resume_takes_new_settings_and_says_so(tmp_path, capsys):
    make_trainer(tiny(tmp_path, "--max-steps=2")).train()
    t = make_trainer(tiny(tmp_path, "--max-steps=4", "--resume", "--lr=0.5", "--weight-decay=0.3"))
    assert "optimizer.lr was 0.001 in the checkpoint and is 0.5 now" in capsys.readouterr().out
    assert t.optimizers[0].param_groups[0]["weight_decay"] == 0.3 and t.step == 2
    t.train()
    assert [line["step"] for line in lines_of(t.folder, "step")] == [1, 2, 3, 4]

# ---- train.py, as processes

KILL = ["--config=smoke", "--data.path=stdlib", "--dropout=0.1", "--micro-batch-size=4",
        "--target-batch-size=8", "--max-steps=24", "--checkpoint.every-steps=4",
        "--logging.every-steps=1", "--eval-every=8", "--d-model=128", "--n-layer=4", "--device=cpu"]


def kill_when(args, cwd, ready, folder):
    """Start train.py and kill -9 it as soon as ready(folder) holds; False if it ended before."""
    p = subprocess.Popen([sys.executable, HERE / "train.py", *args], cwd=cwd,
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while p.poll() is None:
        if ready(folder):
            p.send_signal(signal.SIGKILL)
            break
    p.wait()
    p.stderr.close()
    return p.returncode == -signal.SIGKILL


def last_step(folder):
    try:
        return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, ValueError, KeyError, IndexError):
        return -1


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_any_moment_the_resumed_run_is_the_run(tmp_path, workers):
    args = [*KILL, f"--num-workers={workers}"]
    assert run_script([*args, "--name=whole"], tmp_path).returncode == 0
    whole, folder = tmp_path / "runs/whole", tmp_path / "runs/killed"
    args.append("--name=killed")
    # in the middle of nothing, right after a checkpoint, and while one is being written
    assert kill_when(args, tmp_path, lambda f: last_step(f) >= 6, folder)
    assert kill_when([*args, "--resume"], tmp_path,
                     lambda f: (f / "step_000000000012.pt").exists(), folder)
    assert kill_when([*args, "--resume"], tmp_path,
                     lambda f: last_step(f) >= 13 and list(f.glob("step_*.tmp")), folder)
    assert list(folder.glob("*.tmp")), "the kill came too late to leave a half-written file"
    end = run_script([*args, "--resume"], tmp_path)
    assert end.returncode == 0, end.stderr
    a, b = (read_checkpoint(f / "step_000000000024.pt") for f in (whole, folder))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    for old, new in zip(a["optimizers"], b["optimizers"]):
        assert all(torch.equal(v, new["state"][i][k])
                   for i, state in old["state"].items() for k, v in state.items())
    assert a["position"] == b["position"] and a["best"] == b["best"]
    def keep(f, event, key):
        return [(line["step"], line[key]) for line in lines_of(f, event)]
    assert (keep(whole, "step", "loss") == keep(folder, "step", "loss")
            and keep(whole, "eval", "val_loss") == keep(folder, "eval", "val_loss"))
    assert len(keep(whole, "step", "loss")) == 24


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_well(tmp_path, number):
    args = [*KILL, "--max-steps=100000", "--name=s", "--num-workers=1"]
    p = subprocess.Popen([sys.executable, HERE / "train.py", *args], cwd=tmp_path,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True, start_new_session=True)
    while last_step(tmp_path / "runs/s") < 5 and p.poll() is None:
        time.sleep(0.05)
    # Ctrl-C reaches the whole group
    os.killpg(p.pid, number) if number == signal.SIGINT else p.send_signal(number)
    out, err = p.communicate(timeout=60)
    assert p.returncode == 0 and "--resume goes on from step" in out and not err, err
    step = int(out.split("from step")[1])
    assert (last_step(tmp_path / "runs/s") == step
            and (tmp_path / f"runs/s/step_{step:012d}.pt").exists())


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of unusable things, and one run."""
    folder = tmp_path_factory.mktemp("bad")
    (folder / "empty.txt").write_text("")
    (folder / "short.txt").write_text("too short")
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "big.bin").write_bytes(np.full(5000, 300, "<u2").tobytes())
    (folder / "file").write_text("a file, not a folder")
    np.save(folder / "float.npy", np.zeros(5000))
    (folder / "torn.npy").write_bytes((folder / "float.npy").read_bytes()[:60])
    assert run_script(["--config=smoke", "--name=used", "--max-steps=4"], folder).returncode == 0
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
    (["--lr=1e30", "--grad-clip=0"], "not finite"),
])
def test_refusals_are_one_line_and_exit_2(bad, flags, says):
    before = {p: p.read_bytes() for p in (bad / "runs/used").iterdir()}
    done = run_script(["--config=smoke", *(
        [] if any("name=used" in f or "name=new" in f for f in flags) else ["--name=r"]),
        *flags], bad)
    assert (done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1
            and "Traceback" not in done.stderr), done.stderr
    assert before == {p: p.read_bytes() for p in (bad / "runs/used").iterdir()}, \
        "a refused start must not touch the run"


def test_full_disk_loses_nothing(tmp_path):
    args = [*KILL, "--name=full"]
    assert run_script([*args, "--max-steps=4"], tmp_path).returncode == 0
    size = (tmp_path / "runs/full/step_000000000004.pt").stat().st_size

    def limit():  # a write past the limit fails as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    done = run_script([*args, "--resume"], tmp_path, preexec_fn=limit)
    assert (done.returncode == 2 and "cannot write" in done.stderr
            and done.stderr.count("\n") == 1), done.stderr
    assert (sorted(p.name for p in (tmp_path / "runs/full").iterdir())
            == ["best.pt", "latest.json", "metrics.jsonl", "step_000000000004.pt"])
    assert run_script([*args, "--resume"], tmp_path).returncode == 0


def test_the_commands_and_the_code_of_the_readme(tmp_path):
    text = (HERE / "README.md").read_text(encoding="utf-8")
    for name in ("README.md", "train.py", "config.py", "model.py", "trainer.py"):
        (tmp_path / name).write_text((HERE / name).read_text(encoding="utf-8"), encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", text, re.S)[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    commands = re.findall(r"^(?:pip install \S+ \S+ && )?python (train\.py[^#\n]*)", text, re.M)
    assert len(commands) >= 6
    for command in sorted(commands, key=lambda c: "--resume" in c):  # each as written, but short
        brief = [] if "help" in command else [
            "--max-steps=2", "--sample=", "--eval-batches=1", "--num-workers=0"]
        name = ("--name=again" if "--resume" not in command and commands[0] != command
                and "name" not in command else "")
        extra = [f for f in brief + [name]
                 if f and (f.split("=")[0] not in command or "steps" in f)]
        done = subprocess.run([sys.executable, *command.split(), *extra], cwd=tmp_path,
                              capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and done.stdout, (command, done.stderr)
