"""
The reference transformer and the model registry.
Needs torch and nothing else; copy this file anywhere.

    model = build_model({"name": "reference_transformer", "vocab_size": 256, "n_layer": 6})
    model(input_ids)["logits"]                # (B, T, V)
    model(input_ids, labels=labels)["loss"]   # scalar; labels are already shifted, -100 is ignored

Decoder only: pre-RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases, tied embeddings by
default. Tensor names, layouts and the rotation are those of the Llama family: a state dict of ours
loads in transformers, vLLM or llama.cpp, and theirs loads here; init_from and export() read and
write their folders (with huggingface_hub and safetensors, imported only then).
"""
import importlib
import json
import math
import os
import re

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DEFAULTS = dict(vocab_size=256, block_size=256, n_layer=6, n_head=6, n_kv_head=0, head_dim=0,
                d_model=384, d_ff=0, dropout=0.0, tie_weights=True, attention_bias="none",
                mlp_bias=False, rope_base=10000.0, rope_scaling=(1.0, 1.0, 4.0, 8192.0),
                norm_eps=1e-5)

# ---- the loss, without the logits


def wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)  # what sums of x are kept in


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits `hidden @ weight.T`, a few rows at a time.

    hidden (N, D), weight (V, D), labels (N,) -> scalar; labels of -100, like all below 0, do not
    count, and with none left it is 0. The gradients are made while a chunk's logits exist, so
    nothing of size (N, V) is ever held. They wait unscaled for backward, so the loss scale of fp16
    arrives in time and a probability over N cannot underflow.
    """
    CHUNK = 1 << 23  # logits held at once: 32 MiB in fp32, whatever the vocabulary

    @staticmethod
    def forward(ctx, hidden, weight, labels, needs_grad: bool):
        w = weight.to(hidden.dtype)
        loss = torch.zeros((), device=hidden.device, dtype=wide(hidden))
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide(hidden)) if needs_grad else None
        rows = max(1, ChunkedCrossEntropy.CHUNK // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            h, y = hidden[start:start + rows], labels[start:start + rows, None]
            keep, target = y >= 0, y.clamp(min=0)
            logits = (h @ w.t()).to(loss.dtype)                                   # (rows, V)
            loss -= (torch.log_softmax(logits, -1).gather(1, target) * keep).sum()
            if needs_grad:  # d loss / d logits = softmax - onehot
                # keep: torch.exp is not the same bits in each process
                grad_logits = torch.softmax(logits, -1).scatter_add_(
                    1, target, -torch.ones_like(target, dtype=loss.dtype))
                grad_logits = grad_logits.mul_(keep).to(h.dtype)
                torch.mm(grad_logits, w, out=grad_hidden[start:start + rows])
                if grad_weight.dtype == h.dtype:
                    grad_weight.addmm_(grad_logits.t(), h)
                else:
                    grad_weight += grad_logits.t() @ h
        count = (labels >= 0).sum().clamp(min=1)
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        ctx.weight_dtype = weight.dtype
        return loss / count

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, grad_weight, count = ctx.saved_tensors
        scale = grad / count
        return (grad_hidden * scale.to(grad_hidden.dtype),
                (grad_weight * scale).to(ctx.weight_dtype), None, None)

# ---- kernels
# On a GPU, and under torch.compile, plain torch is best. An eager CPU runs the same operations as
# many passes over memory; written out by hand they are two to three times faster, which is a
# quarter of a training step. Of a few numbers (a single token) the calls cost more than the passes.
SMALL = 1 << 13


def plain(x) -> bool:
    few = x.numel() < SMALL and not torch.is_grad_enabled()
    return x.device.type != "cpu" or torch.compiler.is_compiling() or few


class CPUNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension: F.rms_norm in half the time."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        mean_square = torch.linalg.vector_norm(
            x, dim=-1, keepdim=True, dtype=wide(x)).square_() / x.shape[-1]
        r = (mean_square + eps).rsqrt_().to(x.dtype)
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        gx = grad * x
        grad_weight = r.flatten() @ gx.flatten(0, -2)
        mean = (gx @ weight).unsqueeze(-1) / x.shape[-1]
        return (grad * weight).mul_(r).addcmul_(x, mean * r ** 3, value=-1), grad_weight, None


class CPURotate(torch.autograd.Function):
    """apply_rope without its temporaries. The gradient is the rotation back."""

    @staticmethod
    def forward(ctx, x, cos, sin, sign=1):
        ctx.save_for_backward(cos, sin)
        y = torch.empty(x.shape, dtype=x.dtype)
        (x1, x2), (y1, y2) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
        torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
        torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
        return y

    @staticmethod
    def backward(ctx, grad):
        return CPURotate.forward(ctx, grad, *ctx.saved_tensors, sign=-1), None, None


class CPUAttention(torch.autograd.Function):
    """Causal attention over (B * H, T, D) as plain matrix products, ROWS queries at a time.

    It never looks right of the block's diagonal and keeps the probabilities,
    T*T/2 a head, for backward.
    """
    ROWS, LONGEST = 64, 1024  # past LONGEST the probabilities cost more memory than they save time

    @staticmethod
    def forward(ctx, q, k, v):
        T, D = q.shape[-2:]
        out, probs = torch.empty_like(q), []
        future = torch.ones(CPUAttention.ROWS, CPUAttention.ROWS, dtype=torch.bool).triu(1)
        for s in range(0, T, CPUAttention.ROWS):
            e = min(s + CPUAttention.ROWS, T)
            p = scaled_bmm(q[:, s:e], k[:, :e].transpose(1, 2), D ** -0.5)        # (B * H, rows, e)
            p[:, :, s:].masked_fill_(future[:e - s, :e - s], -math.inf)
            probs.append(torch.softmax(p, dim=-1))
            out[:, s:e] = probs[-1] @ v[:, :e]
        ctx.save_for_backward(q, k, v, *probs)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *probs = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for s, p in zip(range(0, q.shape[1], CPUAttention.ROWS), probs):
            e = p.shape[2]
            g = grad[:, s:e]
            dv[:, :e] += p.transpose(1, 2) @ g
            ds = torch.ops.aten._softmax_backward_data(g @ v[:, :e].transpose(1, 2), p, -1, p.dtype)
            dq[:, s:e] = scaled_bmm(ds, k[:, :e], scale)
            dk[:, :e] += scaled_bmm(ds.transpose(1, 2), q[:, s:e], scale)
        return dq, dk, dv


def scaled_bmm(a, b, scale):
    # beta 0: the first argument is not read
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)


def apply_rope(x, cos, sin):
    """Rotate (B, H, T, D) by angles given as (T, D / 2):
    pairs are (i, i + D / 2), as in the Llama family."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if not plain(x):
        return CPURotate.apply(x, cos, sin)
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def attend(q, k, v, mask):
    """q (B, H, T, D), k and v (B, H_kv, S, D), mask None (causal; all of it for a single query
    after S - 1 cached ones) or boolean, broadcast to (B, 1, T, S) -> (B, H, T, D)."""
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    causal = mask is None and q.shape[2] > 1
    if q.device.type != "cpu" or not causal or q.shape[2] > CPUAttention.LONGEST:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return CPUAttention.apply(*(t.flatten(0, 1) for t in (q, k, v))).view_as(q)

# ---- the transformer


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        weight = self.weight.to(x.dtype)
        return (F.rms_norm(x, weight.shape, weight, self.eps) if plain(x)
                else CPUNorm.apply(x, weight, self.eps))


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim, bias = c["head_dim"], c["attention_bias"]
        self.q_proj = nn.Linear(c["d_model"], c["n_head"] * self.head_dim, bias != "none")
        self.k_proj = nn.Linear(c["d_model"], c["n_kv_head"] * self.head_dim, bias != "none")
        self.v_proj = nn.Linear(c["d_model"], c["n_kv_head"] * self.head_dim, bias != "none")
        self.o_proj = nn.Linear(c["n_head"] * self.head_dim, c["d_model"], bias == "qkvo")

    def forward(self, x, cos, sin, mask, past):
        B, T, C = x.shape
        q, k, v = (p(x).view(B, T, -1, self.head_dim).transpose(1, 2)             # (B, H, T, D)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        if past is not None:
            start, kept_k, kept_v = past
            kept_k[:, :, start:start + T], kept_v[:, :, start:start + T] = k, v
            k, v = kept_k[:, :, :start + T], kept_v[:, :, :start + T]
        y = attend(q, k, v, mask)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["d_model"], c["d_ff"], c["mlp_bias"])
        self.up_proj = nn.Linear(c["d_model"], c["d_ff"], c["mlp_bias"])
        self.down_proj = nn.Linear(c["d_ff"], c["d_model"], c["mlp_bias"])

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c["d_model"], c["norm_eps"])
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c["d_model"], c["norm_eps"])
        self.mlp = MLP(c)
        self.dropout = nn.Dropout(c["dropout"])

    def forward(self, x, cos, sin, mask, past):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, mask, past))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


def rope_angles(c) -> torch.Tensor:
    """Angle of each position and pair, (block_size, head_dim / 2), in float64.

    rope_scaling is Llama 3's (factor, low_freq_factor, high_freq_factor, original_context): pairs
    that turn less than low_freq_factor times in the original context are slowed down by the factor,
    those of more than high_freq_factor turns are left, with a ramp between. Context 0 slows all.
    """
    D, (factor, low, high, context) = c["head_dim"], c["rope_scaling"]
    inv_freq = c["rope_base"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    turns = context * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    # fp32 angles as the family has them
    inv_freq = (inv_freq * (kept + (1 - kept) / factor)).float()
    return torch.outer(torch.arange(c["block_size"]).float(), inv_freq).double()


class Decoder(nn.Module):
    """Token ids (B, T) to normed hidden states (B, T, C)."""

    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["d_model"])
        self.layers = nn.ModuleList(Block(c) for _ in range(c["n_layer"]))
        self.norm = RMSNorm(c["d_model"], c["norm_eps"])
        self.dropout = nn.Dropout(c["dropout"])
        self.gradient_checkpointing = False
        self.cache_shape = (c["n_kv_head"], c["block_size"], c["head_dim"])
        # keep: the powers, sines and cosines in float64 and rounded, because those of fp32 are not
        # the same bits in each process, and a resumed run would not be the run
        angles = rope_angles(c)
        self.register_buffer("cos", angles.cos().float(), persistent=False)     # (T, D / 2)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, input_ids, mask, cache):
        (B, T), device = input_ids.shape, input_ids.device.type
        x = self.dropout(self.embed_tokens(input_ids))
        if torch.is_autocast_enabled(device):
            # keep: the residual stream in half precision, or every add is cast
            x = x.to(torch.get_autocast_dtype(device))
        if cache == {}:
            cache |= dict(length=0, kept=x.new_empty(len(self.layers), 2, B, *self.cache_shape))
        start = cache["length"] if cache else 0
        cos, sin = self.cos[start:start + T], self.sin[start:start + T]
        pasts = [(start, *kv) for kv in cache["kept"]] if cache else [None] * len(self.layers)
        for layer, past in zip(self.layers, pasts):
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, cos, sin, mask, past, use_reentrant=False)
            else:
                x = layer(x, cos, sin, mask, past)
        if cache:
            cache["length"] += T
        return self.norm(x)


class ReferenceTransformer(nn.Module):
    """A causal language model from a dict of the keys in DEFAULTS.

    n_kv_head 0 means n_head, head_dim 0 means d_model / n_head, d_ff 0 means 8/3 d_model rounded up
    to a multiple of 64. attention_bias is "none", "qkv" (as Qwen2) or "qkvo" (as Llama).

    tensor                 init
    embed_tokens, lm_head  normal, std 0.02, less above d_model 384: the first loss is near ln V
    q_proj k_proj v_proj
    gate_proj up_proj      normal, std 0.02
    o_proj, down_proj      normal, std 0.02 / sqrt(2 n_layer): the residual stream keeps its size
    norms, biases          1, 0
    """

    def __init__(self, config: dict):
        super().__init__()
        c = {**DEFAULTS, **config}
        c["n_kv_head"] = c["n_kv_head"] or c["n_head"]
        c["d_ff"] = c["d_ff"] or 64 * math.ceil(c["d_model"] * 8 / 3 / 64)
        if (not c["head_dim"] and c["d_model"] % c["n_head"] or c["n_head"] % c["n_kv_head"]
                or (c["head_dim"] or c["d_model"] // c["n_head"]) % 2):
            raise ValueError(f"d_model {c['d_model']} must be n_head {c['n_head']} heads of an "
                             f"even size, and n_head a multiple of n_kv_head {c['n_kv_head']}")
        c["head_dim"] = c["head_dim"] or c["d_model"] // c["n_head"]
        self.config = c
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c["d_model"], c["vocab_size"], bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = (0.02 / math.sqrt(2 * c["n_layer"])
                       if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)
                if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    # logits have variance d_model * std ** 2
                    std *= min(1.0, math.sqrt(384 / c["d_model"]))
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if c["tie_weights"]:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.register_load_state_dict_pre_hook(fill_tied_head)

    def set_gradient_checkpointing(self, enabled: bool):
        """Recompute each layer's activations in backward: less memory, about a third more time."""
        self.model.gradient_checkpointing = enabled

    def forward(self, input_ids, labels=None, attention_mask=None, cache=None):
        """input_ids, labels, attention_mask (B, T) -> {"logits": (B, T, V)},
        with labels {"loss": scalar}.

        labels[t] is the token after input_ids[t]; -100, and positions the mask leaves out, do not
        count. attention_mask is 1 for tokens and 0 for padding, on either side. cache: a dict,
        empty at first, that keeps the "length" and the keys and values of all positions so far;
        input_ids are then the next ones (generation, without a mask). Raises ValueError past
        block_size.
        """
        B, T = input_ids.shape
        past = cache["length"] if cache else 0
        if past + T > self.config["block_size"]:
            raise ValueError(f"a sequence of {past + T} tokens is longer than "
                             f"block_size {self.config['block_size']}")
        mask = None
        if past and T > 1:
            mask = torch.ones(T, past + T, dtype=torch.bool, device=input_ids.device).tril(past)
        if attention_mask is not None:
            if cache is not None:
                raise ValueError("a cache and an attention_mask do not go together")
            keep = attention_mask.bool()
            mask = (torch.ones(T, T, dtype=torch.bool, device=keep.device).tril()
                    & keep[:, None, None, :])
            # padding sees itself: no row of -inf, no NaN
            mask |= torch.eye(T, dtype=torch.bool, device=keep.device)
            labels = labels if labels is None else labels.masked_fill(~keep, -100)
        x = self.model(input_ids, mask, cache)
        if labels is None:
            return {"logits": self.lm_head(x)}
        return {"loss": ChunkedCrossEntropy.apply(
            x.flatten(0, 1), self.lm_head.weight, labels.flatten(), torch.is_grad_enabled())}


def fill_tied_head(module, state_dict, prefix, *_):
    """Files of tied models leave lm_head.weight out."""
    if prefix + "model.embed_tokens.weight" in state_dict:
        state_dict.setdefault(prefix + "lm_head.weight",
                              state_dict[prefix + "model.embed_tokens.weight"])

# ---- checkpoints of the Llama family: a folder, or a repo on the Hugging Face Hub


def pretrained_file(source: str, name: str) -> str:
    """The path of a file of a folder or Hub repo. Raises FileNotFoundError if it has none, OSError
    for trouble on the way."""
    path, said = os.path.join(source, name), f"model.init_from={source}"
    if os.path.isdir(source):
        if not os.path.exists(path):
            raise FileNotFoundError(f"{said}: no {name} there")
        return path
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
        raise FileNotFoundError(f"{said}: no such folder, and no user/name of a Hub repo")
    from huggingface_hub import errors, hf_hub_download
    try:
        return hf_hub_download(source, name)
    except errors.RemoteEntryNotFoundError:
        raise FileNotFoundError(f"{said}: no {name} there") from None
    except Exception as e:  # the network has many ways to fail
        raise OSError(f"{said}: {' '.join(str(e).split())[:200]}") from e


def pretrained_json(source: str, name: str, read):
    """read(content) of a JSON file of a checkpoint. Raises ValueError for what is not as it ought
    to be, and like pretrained_file."""
    with open(pretrained_file(source, name), encoding="utf-8") as f:
        try:
            return read(json.load(f))
        except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError, IndexError,
                RecursionError) as e:
            raise ValueError(f"model.init_from={source}: {name} is not that of a Llama-family "
                             f"model: {type(e).__name__} {e}") from None


def pretrained_config(c: dict) -> dict:
    """What the checkpoint c["init_from"] asks of a config: {"model": keys of DEFAULTS, from its
    config.json, "data": {"tokenizer": it too, if it has one and is no model of bytes}}.

    block_size is c's, or what the checkpoint was made for if that is less. Raises ValueError by the
    name of a setting that ReferenceTransformer cannot represent, OSError if it cannot be read.
    """
    source = c["init_from"]

    def read(hf):
        vocab, layers, heads, width, ff = (int(hf[k]) for k in (
            "vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size",
            "intermediate_size"))
        family, positions = hf["model_type"], int(hf.get("max_position_embeddings", 2048))
        # transformers 5 keeps base and scaling together, and lets an older rope_scaling win
        together = hf.get("rope_parameters") or {}
        rope = hf.get("rope_scaling") or together
        base = rope.get("rope_theta", hf.get("rope_theta", together.get("rope_theta", 10000.0)))
        kind = rope.get("rope_type", rope.get("type", "default"))
        scaling = {
            "linear": lambda: (rope["factor"], 1, 4, 0),
            "llama3": lambda: (rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"],
                               rope.get("original_max_position_embeddings", positions)),
        }.get(kind, lambda: DEFAULTS["rope_scaling"])()
        window = (hf.get("sliding_window")
                  if hf.get("use_sliding_window", family != "qwen2") else None)
        block_size = min(c["block_size"], positions)
        partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
        for holds, what in (
                (family in ("llama", "mistral", "qwen2"), f"model_type={family}"),
                (hf.get("hidden_act", "silu") in ("silu", "swish"),
                 f"hidden_act={hf.get('hidden_act')}"),
                (kind in ("default", "linear", "llama3"), f"rope type {kind}"),
                (partial == 1.0, f"partial_rotary_factor={partial}"),
                (window is None or int(window) >= block_size,
                 f"sliding_window={window} below model.block_size={block_size}"),
                (not hf.get("quantization_config"), "quantization_config"),
                (float(base) > 0, f"rope_theta={base}")):
            if not holds:
                return f"{what} is more than the reference transformer can be"
        bias = hf.get("attention_bias", False) and family == "llama"
        return dict(
            vocab_size=vocab, n_layer=layers, n_head=heads, d_model=width, d_ff=ff,
            block_size=block_size, n_kv_head=int(hf.get("num_key_value_heads") or heads),
            head_dim=int(hf.get("head_dim") or width // heads),
            tie_weights=hf.get("tie_word_embeddings", False) is True,
            attention_bias="qkv" if family == "qwen2" else "qkvo" if bias else "none",
            mlp_bias=hf.get("mlp_bias", False) is True, rope_base=float(base),
            rope_scaling=tuple(map(float, scaling)), norm_eps=float(hf.get("rms_norm_eps", 1e-6)))

    ours = pretrained_json(source, "config.json", read)
    if isinstance(ours, str):
        raise ValueError(f"model.init_from={source}: {ours}")
    try:        # a model of bytes, as export() writes it, has one that is no news
        merges = pretrained_json(source, "tokenizer.json", lambda t: t["model"].get("merges"))
        tokenizer = "" if ours["vocab_size"] == 256 and not merges else source
    except FileNotFoundError:
        tokenizer = ""
        print(f"notice   model.init_from={source}: no tokenizer.json there, text is read as bytes",
              flush=True)
    return {"model": ours, "data": {"tokenizer": tokenizer}}


@torch.no_grad()
def load_pretrained(model, source: str):
    """Fill a ReferenceTransformer with the safetensors weights of a folder or Hub repo. Raises
    ValueError if they are not exactly its own, OSError if they cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    own, said = model.state_dict(), f"model.init_from={source}"
    tied = {"lm_head.weight"} if model.config["tie_weights"] else set()
    missing = own.keys() - tied
    try:
        names = pretrained_json(source, "model.safetensors.index.json",
                                lambda index: sorted(set(index["weight_map"].values())))
    except FileNotFoundError:
        names = ["model.safetensors"]
    for name in names:
        try:
            tensors = load_file(pretrained_file(source, name))
        except SafetensorError as e:
            raise ValueError(f"{said}: {name}: {e}") from e
        for key, tensor in tensors.items():
            if key.endswith("rotary_emb.inv_freq"):     # older files have the angles, too
                continue
            if key not in own or own[key].shape != tensor.shape:
                place = f"not {tuple(own[key].shape)}" if key in own else "which has no place here"
                raise ValueError(f"{said}: {key} is {tuple(tensor.shape)}, {place}")
            if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                raise ValueError(f"{said}: {key} is {tensor.dtype}, not a plain float type")
            if not tensor.isfinite().all():
                raise ValueError(f"{said}: {key} holds numbers that are not finite")
            if key not in tied:
                own[key].copy_(tensor)
            missing.discard(key)
    if missing:
        raise ValueError(f"{said}: {min(missing)} is missing")


def exported_files(model, tokenizer: dict, eos_token_id=None) -> dict:
    """{name: bytes} that make a folder with model.safetensors a model of transformers: config.json
    and the files of the `tokenizer`. Raises ValueError for a model that no family has."""
    if not isinstance(model, ReferenceTransformer):
        raise ValueError(f"only the reference transformer can be exported, "
                         f"not a {type(model).__name__}")
    c = model.config
    qwen, (factor, low, high, context) = c["attention_bias"] == "qkv", c["rope_scaling"]
    if qwen and c["mlp_bias"]:
        raise ValueError("no family has model.attention_bias=qkv together with model.mlp_bias")
    scaling = None if factor == 1 else {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": int(context)}
    if scaling and not context:
        scaling = {"rope_type": "linear", "factor": factor}
    config = dict(
        architectures=["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        model_type="qwen2" if qwen else "llama", vocab_size=c["vocab_size"],
        hidden_size=c["d_model"], intermediate_size=c["d_ff"], num_hidden_layers=c["n_layer"],
        num_attention_heads=c["n_head"], num_key_value_heads=c["n_kv_head"],
        head_dim=c["head_dim"], max_position_embeddings=c["block_size"], hidden_act="silu",
        rms_norm_eps=c["norm_eps"], tie_word_embeddings=c["tie_weights"],
        attention_bias=c["attention_bias"] == "qkvo", mlp_bias=c["mlp_bias"],
        rope_theta=c["rope_base"], rope_scaling=scaling, bos_token_id=None,
        eos_token_id=eos_token_id, torch_dtype="float32")
    return {"config.json": json.dumps(config, indent=2).encode(), **tokenizer}


def export(model, folder: str, files: dict):
    """Write a folder that transformers, vLLM and llama.cpp read: `files`, as exported_files() makes
    them, and model.safetensors, in shards above 5 GB. Raises OSError."""
    from huggingface_hub import save_torch_state_dict
    os.makedirs(folder, exist_ok=True)
    for name, content in files.items():
        with open(os.path.join(folder, name), "wb") as f:
            f.write(content)
    # named_parameters has tied weights once
    weights = {k: p.detach().cpu() for k, p in model.named_parameters()}
    save_torch_state_dict(weights, folder, metadata={"format": "pt"})


# ---- the registry

MODELS = {"reference_transformer": ReferenceTransformer, "gpt": ReferenceTransformer}


def register_model(name: str, factory=None):
    """`register_model("mine", factory)`, or `@register_model("mine")` above it.
    factory(dict) -> nn.Module."""
    if factory is None:
        return lambda f: register_model(name, f)
    MODELS[name] = factory
    return factory


def build_model(config: dict) -> nn.Module:
    """The model that config["name"] says: a registered name, or
    `package.module:factory` from the import path.

    Raises ValueError for a name that is not known or cannot be imported.
    """
    name = config["name"]
    factory = MODELS.get(name)
    if factory is None and ":" in name:
        module, _, attribute = name.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except Exception as e:  # their module may fail in any way
            said = " ".join(str(e).split())
            raise ValueError(f"model.name={name}: {type(e).__name__}: {said}") from e
    if factory is None:
        raise ValueError(f"model.name={name} is not known; there are {', '.join(sorted(MODELS))}, "
                         f"or package.module:factory")
    # keep: before the first tensor is filled, because the threads torch starts then inherit it.
    # Sharp attention has probabilities below 1e-38, and a step full of them takes twice the time.
    torch.set_flush_denormal(True)
    model = factory(config)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.name={name} made a {type(model).__name__}, not an nn.Module")
    if config.get("init_from"):
        load_pretrained(model, config["init_from"])
    return model
