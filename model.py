"""
The reference transformer and the model registry.
Needs torch and nothing else; copy this file anywhere.

    model = build_model({"vocab_size": 256, "n_layer": 6})    # the other keys: see DEFAULTS
    model(input_ids)["logits"]                                # (B, T, V)
    model(input_ids, labels=labels)["loss"]                   # scalar; labels are already shifted

Decoder only: pre-RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings by default. Names
and layouts of tensors are those of the Llama family. init_from and export() read and write folders
of Llama, Mistral, Qwen2 and Qwen3 (with huggingface_hub and safetensors, imported then).
"""
import contextlib
import difflib
import functools
import importlib
import json
import math
import os
import re
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DEFAULTS = dict(
    name="reference_transformer", init_from="",     # for build_model: which one, weights from where
    vocab_size=256, block_size=256,                 # 256 = bytes; longer sequences are refused
    n_layer=4, n_head=4, n_kv_head=0, head_dim=0,   # 0 = n_head; 0 = d_model / n_head
    d_model=256, d_ff=0,                            # 0 = 8/3 d_model, up to a multiple of 64
    dropout=0.0, tie_weights=True,                  # on the embedding and on each branch
    qkv_bias=False, qk_norm=False,                  # Qwen2 has the first, Qwen3 the second
    rope_base=10000.0, rope_scaling=(1.0, 1.0, 4.0, 8192.0),        # see rope_angles()
    norm_eps=1e-5)

# ---- the loss, without the logits

CPU_LOGITS = 1 << 25  # logits held at once on a CPU: 128 MiB in fp32, whatever the vocabulary


def wide(x) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)  # what sums of x are kept in


def rows_per_chunk(device: torch.device, vocab_size: int) -> int:
    """How many rows of logits ChunkedCrossEntropy makes at once: few on a CPU, for its memory.

    Each chunk reads the bf16 weights twice, writes and reads their bf16 gradient, and
    reads and writes its fp32 sum: 16 V D bytes. Its three products are 6 rows V D operations. With
    F operations/s and B bytes/s the bytes take less than 5 % of the products' time if
    16 V D / B < 0.05 * 6 rows V D / F, or rows > 53 F / B. F / B is 153 on an A100 (8,200 rows),
    164 on a 4090 (8,700), 203 on a T4 (10,800), 295 on an H100 (15,700), 34 on an M4 Max (1,800).
    """
    if device.type == "cpu":
        return max(1, CPU_LOGITS // vocab_size)
    memory = 6 << 30 if device.type == "mps" else 80 << 30    # an Apple GPU shares its memory
    if device.type == "cuda" and torch.cuda.is_available():   # else these are fake tensors
        memory = torch.cuda.get_device_properties(device).total_memory
    return max(1, min(16384, memory // 6 // (8 * vocab_size)))  # 8 bytes a logit, a sixth of it


def chunk_loss(h, labels, w, grad_h, grad_w):
    """Summed cross-entropy of the logits h @ w.T: h (rows, D), labels (rows, 1), w (V, D).
    Writes the gradient of h to grad_h and adds that of w to grad_w, unless grad_w is None."""
    keep, target = labels >= 0, labels.clamp(min=0)
    logits = (h @ w.t()).to(wide(h))                                              # (rows, V)
    probs = torch.log_softmax(logits, -1)
    loss = -(probs.gather(1, target) * keep).sum()
    if grad_w is None:
        return loss
    # keep: softmax once more, because torch.exp is not the same bits in each process
    torch.softmax(logits, -1, out=probs)
    del logits      # two fp32 tensors of this size at once, no more: 8 bytes a logit
    # d loss / d logits = softmax - onehot
    probs.scatter_add_(1, target, -torch.ones_like(target, dtype=probs.dtype))
    grad_logits = probs.to(h.dtype)
    # rows that do not count are taken out here, where they have D numbers and not V
    torch.mm(grad_logits, w, out=grad_h).mul_(keep)
    if grad_w.dtype == h.dtype:
        grad_w.addmm_(grad_logits.t(), h * keep)
    else:
        grad_w += grad_logits.t() @ (h * keep)
    return loss


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits `hidden @ weight.T`, a few rows at a time.

    hidden (N, D), weight (V, D), labels (N,) -> scalar. Negative labels do not count; without any
    other the loss is 0. The gradients are made while a chunk's logits exist, so nothing of size
    (N, V) is ever held. They are scaled in backward: the loss scale of fp16 is known only then, and
    a probability divided by N could underflow.
    """
    @staticmethod
    def forward(ctx, hidden, weight, labels, needs_grad: bool):
        w, labels = weight.to(hidden.dtype), labels.unsqueeze(1)
        loss = torch.zeros((), device=hidden.device, dtype=wide(hidden))
        grad_hidden = torch.empty_like(hidden) if needs_grad else hidden    # else never written
        grad_weight = torch.zeros_like(weight, dtype=wide(hidden)) if needs_grad else None
        rows = rows_per_chunk(hidden.device, weight.shape[0])
        for h, y, grad_h in zip(*(t.split(rows) for t in (hidden, labels, grad_hidden))):
            loss += chunk_loss(h, y, w, grad_h, grad_weight)
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
# On a GPU plain torch is best. An eager CPU makes passes over memory: written out by hand these
# operations take half the time or less, a quarter of a training step. torch.compile fuses the
# passes of norms and rotations by itself, but not those of attention.

SMALL = 1 << 13  # numbers below which the calls cost more than the passes (a single token)
ROWS = 128       # queries that attention takes at once
LONGEST = 1024   # for longer T its probabilities cost more memory than they save time


def plain(x) -> bool:
    """Is torch's own operation the faster one for x?"""
    few = x.numel() < SMALL and not torch.is_grad_enabled()
    return x.device.type != "cpu" or few


class CPUNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last dimension: F.rms_norm in half the time."""
    @staticmethod
    def forward(ctx, x, weight, eps):
        mean_square = torch.linalg.vector_norm(
            x, dim=-1, keepdim=True, dtype=wide(x)).square_() / x.shape[-1]
        r = (mean_square + eps).rsqrt_().to(x.dtype)
        ctx.save_for_backward(x, weight, r)     # r = 1 / rms, (..., 1)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        # y_i = x_i r w_i and d r / d x_j = -r^3 x_j / D, so with g the gradient of y
        # d x_j = g_j w_j r - x_j r^3 mean_i(g_i w_i x_i)
        x, weight, r = ctx.saved_tensors
        gx = grad * x
        grad_weight = r.flatten() @ gx.flatten(0, -2)                             # (D,)
        mean = (gx @ weight).unsqueeze(-1) / x.shape[-1]
        return (grad * weight).mul_(r).addcmul_(x, mean * r ** 3, value=-1), grad_weight, None


class CPURotate(torch.autograd.Function):
    """apply_rope without its temporaries. The gradient is rotated by the opposite angle."""
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
    """Causal attention over (B * H, T, D), ROWS queries at a time. These need no keys right of the
    diagonal: half of the work. Backward needs the probabilities, T * T / 2 numbers a head."""
    @staticmethod
    def forward(ctx, q, k, v):
        T, D = q.shape[-2:]
        out, probs = torch.empty_like(q), []
        future = torch.ones(ROWS, ROWS, dtype=torch.bool).triu(1)
        for s in range(0, T, ROWS):
            e = min(s + ROWS, T)
            p = scaled_bmm(q[:, s:e], k[:, :e].transpose(1, 2), D ** -0.5)        # (B * H, rows, e)
            p[:, :, s:].masked_fill_(future[:e - s, :e - s], -math.inf)  # the block on the diagonal
            probs.append(torch.softmax(p, dim=-1))
            out[:, s:e] = probs[-1] @ v[:, :e]
        ctx.save_for_backward(q, k, v, *probs)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *probs = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for s, p in zip(range(0, q.shape[1], ROWS), probs):
            e, g = p.shape[2], grad[:, s:p.shape[2]]                              # (B * H, rows, D)
            dv[:, :e] += p.transpose(1, 2) @ g
            ds = torch.ops.aten._softmax_backward_data(g @ v[:, :e].transpose(1, 2), p, -1, p.dtype)
            dq[:, s:e] = scaled_bmm(ds, k[:, :e], scale)
            dk[:, :e] += scaled_bmm(ds.transpose(1, 2), q[:, s:e], scale)
        return dq, dk, dv


def scaled_bmm(a, b, scale):
    """scale * a @ b in one pass. With beta 0 the first argument of baddbmm is not read."""
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)


def apply_rope(x, cos, sin):
    """Rotate the pairs (i, i + D / 2) of x (B, H, T, D); cos and sin are (T, D / 2)."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if plain(x) or torch.compiler.is_compiling():
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return CPURotate.apply(x, cos, sin)


def attend(q, k, v, mask):
    """q (B, H, T, D), k and v (B, H_kv, S, D) -> (B, H, T, D). mask is True where a query sees a
    key, (B, 1, T, S). None is causal, and then S = T, or T = 1 and the query sees all keys."""
    repeat = q.shape[1] // k.shape[1]   # each K/V head serves this many query heads
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    causal = mask is None and q.shape[2] > 1
    # the loop over blocks is unrolled by torch.compile: a long one would take minutes to compile
    longest = 2 * ROWS if torch.compiler.is_compiling() else LONGEST
    if plain(q) or not causal or q.shape[2] > longest:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return CPUAttention.apply(*(t.flatten(0, 1) for t in (q, k, v))).view_as(q)

# ---- the transformer


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        weight = self.weight.to(x.dtype)
        if plain(x) or torch.compiler.is_compiling():
            # keep: autocast on a GPU lets rms_norm return fp32, and the loss would be fp32 products
            return F.rms_norm(x, weight.shape, weight, self.eps).to(x.dtype)
        return CPUNorm.apply(x, weight, self.eps)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        C, D, bias = c["d_model"], c["head_dim"], c["qkv_bias"]
        self.q_proj = nn.Linear(C, c["n_head"] * D, bias)
        self.k_proj = nn.Linear(C, c["n_kv_head"] * D, bias)
        self.v_proj = nn.Linear(C, c["n_kv_head"] * D, bias)
        self.o_proj = nn.Linear(c["n_head"] * D, C, bias=False)
        # norms that all heads share
        self.q_norm = RMSNorm(D, c["norm_eps"]) if c["qk_norm"] else nn.Identity()
        self.k_norm = RMSNorm(D, c["norm_eps"]) if c["qk_norm"] else nn.Identity()

    def forward(self, x, cos, sin, mask, past):
        T, D = x.shape[1], 2 * cos.shape[-1]
        q, k, v = (proj(x).unflatten(-1, (-1, D))                                 # (B, T, H, D)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = apply_rope(self.q_norm(q).transpose(1, 2), cos, sin)                  # (B, H, T, D)
        k, v = apply_rope(self.k_norm(k).transpose(1, 2), cos, sin), v.transpose(1, 2)
        if past is not None:
            # the cache holds keys after the rotation: each position has one for good
            start, kept_k, kept_v = past                                          # (B, H_kv, S, D)
            kept_k[:, :, start:start + T], kept_v[:, :, start:start + T] = k, v
            k, v = kept_k[:, :, :start + T], kept_v[:, :, :start + T]
        return self.o_proj(attend(q, k, v, mask).transpose(1, 2).flatten(2))      # (B, T, C)


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["d_model"], c["d_ff"], bias=False)
        self.up_proj = nn.Linear(c["d_model"], c["d_ff"], bias=False)
        self.down_proj = nn.Linear(c["d_ff"], c["d_model"], bias=False)

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
    """Angle of each position and pair, (block_size, head_dim / 2), in radians and float64.
    rope_scaling is Llama 3's (factor, low, high, old context): pairs that turn less than `low`
    times in the old context are slowed down by the factor, above `high` not, with a ramp between.
    """
    D, (factor, low, high, context) = c["head_dim"], c["rope_scaling"]
    inv_freq = c["rope_base"] ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)    # (D / 2,)
    turns = context * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)       # 1 = left as it is, 0 = slowed down
    # rounded to fp32 where the family rounds them
    inv_freq = (inv_freq * (kept + (1 - kept) / factor)).float()
    return torch.outer(torch.arange(c["block_size"]).float(), inv_freq).double()


def complete(config: dict) -> dict:
    """DEFAULTS with `config` over them, and the sizes that a 0 stands for.
    Raises ValueError for an unknown key, a bad value, or sizes that do not fit."""
    c = dict(DEFAULTS)
    for key, value in config.items():
        if key not in DEFAULTS:
            near = difflib.get_close_matches(str(key), DEFAULTS, n=1, cutoff=0.0)
            raise ValueError(f"model.{key} is not a setting; the nearest is model.{near[0]}")
        default, kind = DEFAULTS[key], type(DEFAULTS[key])
        fits = type(value) in {float: (float, int), tuple: (tuple, list)}.get(kind, (kind,))
        # numbers are positive, or 0 where that is the default
        if not fits or kind in (int, float) and value != default and not 0 < value < math.inf:
            raise ValueError(f"model.{key}={value!r} is no valid {kind.__name__}; try {default!r}")
        c[key] = kind(value)
    width, heads = c["d_model"], c["n_head"]
    even = c["head_dim"] % 2 == 0 if c["head_dim"] else width % (2 * heads) == 0
    c["head_dim"] = c["head_dim"] or width // heads
    c["n_kv_head"] = c["n_kv_head"] or heads
    # three matrices of 8/3 the width have as many parameters as two of 4 times the width
    c["d_ff"] = c["d_ff"] or 64 * math.ceil(width * 8 / 3 / 64)
    if not even or heads % c["n_kv_head"]:
        raise ValueError(f"model.d_model={width} must be n_head={heads} heads of an even size, and "
                         f"n_head a multiple of n_kv_head={c['n_kv_head']}")
    return c


class ReferenceTransformer(nn.Module):
    """A causal language model from a dict of keys of DEFAULTS. Raises ValueError for others.
    Norms begin as 1, biases as 0, matrices as normal numbers with a std of 0.02 or less."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = c = complete(config)
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(c["vocab_size"], c["d_model"]),
            layers=nn.ModuleList(Block(c) for _ in range(c["n_layer"])),
            norm=RMSNorm(c["d_model"], c["norm_eps"])))
        self.lm_head = nn.Linear(c["d_model"], c["vocab_size"], bias=False)
        self.dropout = nn.Dropout(c["dropout"])
        self.gradient_checkpointing = False
        # keep: the powers, sines and cosines in float64 and rounded, because those of fp32 are not
        # the same bits in each process, and a resumed run would not be the run
        angles = rope_angles(c)
        self.register_buffer("cos", angles.cos().float(), persistent=False)     # (T, D / 2)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        # o_proj and down_proj add 2 n_layer times to the residual stream, which keeps its size
        branch = 0.02 / math.sqrt(2 * c["n_layer"])
        # logits have variance d_model * std^2: small, so that the first loss is ln(vocab_size)
        token = 0.02 * min(1.0, math.sqrt(384 / c["d_model"]))
        stds = {"o_proj": branch, "down_proj": branch, "embed_tokens": token, "lm_head": token}
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=stds.get(name.split(".")[-2], 0.02))
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        if c["tie_weights"]:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.register_load_state_dict_pre_hook(fill_tied_head)

    def set_gradient_checkpointing(self, enabled: bool):
        """Recompute each layer's activations in backward: less memory, about a third more time."""
        self.gradient_checkpointing = enabled

    def hidden_states(self, input_ids, mask, cache):
        """Token ids (B, T) to normed hidden states (B, T, C)."""
        (B, T), device, c = input_ids.shape, input_ids.device.type, self.config
        x = self.dropout(self.model.embed_tokens(input_ids.long()))               # (B, T, C)
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            # keep: the residual stream in half precision, or every add is cast
            x = x.to(torch.get_autocast_dtype(device))
        if cache == {}:     # keys and values of each layer, room for block_size positions
            cache |= dict(length=0, kept=x.new_empty(
                c["n_layer"], 2, B, c["n_kv_head"], c["block_size"], c["head_dim"]))
        start = cache["length"] if cache else 0
        cos, sin = self.cos.narrow(0, start, T), self.sin.narrow(0, start, T)     # (T, D / 2)
        for i, layer in enumerate(self.model.layers):
            past = (start, *cache["kept"][i]) if cache else None
            if self.gradient_checkpointing and self.training:
                x = checkpoint(layer, x, cos, sin, mask, past, use_reentrant=False)
            else:
                x = layer(x, cos, sin, mask, past)
        if cache:
            cache["length"] += T
        return self.model.norm(x)

    def forward(self, input_ids, labels=None, attention_mask=None, cache=None):
        """input_ids, labels, attention_mask (B, T) -> {"logits": (B, T, V)}, or with labels
        {"loss": scalar}. labels[t] is the token after input_ids[t]; negative ones do not count.
        attention_mask is 1 for tokens and 0 for padding, on either side. cache is for generation,
        without gradients: a dict, empty at first, with what attention needs of all tokens so far.
        input_ids then come after those. Raises ValueError past block_size, and for a cache with a
        mask."""
        T, device, limit = input_ids.shape[1], input_ids.device, self.config["block_size"]
        past = cache["length"] if cache else 0
        if past + T > limit:
            raise ValueError(f"a sequence of {past + T} tokens is longer than block_size {limit}")
        if cache is not None and attention_mask is not None:
            raise ValueError("a cache and an attention_mask do not go together")
        mask = None         # causal
        if attention_mask is not None or past and T > 1:
            # each token sees the cached ones and its own past
            mask = torch.ones(T, past + T, dtype=torch.bool, device=device).tril(past)
        if attention_mask is not None:
            padding = ~attention_mask.bool()
            # padding sees itself: no row of -inf, no NaN
            itself = torch.eye(T, dtype=torch.bool, device=device)
            mask = mask & ~padding[:, None, None, :] | itself                     # (B, 1, T, T)
        # keep: no gradient through a cache. It is written in place, which autograd refuses.
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            x = self.hidden_states(input_ids, mask, cache)                        # (B, T, C)
            if labels is None:
                return {"logits": self.lm_head(x)}
            labels = labels.long()
            if attention_mask is not None:
                labels = labels.masked_fill(padding, -100)
            return {"loss": ChunkedCrossEntropy.apply(
                x.flatten(0, 1), self.lm_head.weight, labels.flatten(), torch.is_grad_enabled())}


def fill_tied_head(module, state_dict, prefix, *_):
    """Files of tied models leave lm_head.weight out."""
    embedding = state_dict.get(prefix + "model.embed_tokens.weight")
    if embedding is not None:
        state_dict.setdefault(prefix + "lm_head.weight", embedding)

# ---- checkpoints of other tools: a folder, or a repo on the Hugging Face Hub

NAMES = {   # our keys and those of config.json
    "vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads", "head_dim": "head_dim", "d_model": "hidden_size",
    "d_ff": "intermediate_size", "tie_weights": "tie_word_embeddings", "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps"}
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ONLY = {    # settings of a config.json and what ReferenceTransformer has of them, the usual first
    "model_type": ("llama", "mistral", "qwen2", "qwen3"), "rope_type": ("default", "llama3"),
    "hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,), "quantization_config": ({},)}
# what an export keeps of its source. A model with a window needs it at its full length
KEPT = (*SPECIAL_IDS, "model_type", "max_position_embeddings", "sliding_window",
        "use_sliding_window", "max_window_layers", "layer_types")


def package(name: str):
    """A package that only checkpoints need. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"checkpoints need a package: pip install {name.split('.')[0]}") from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def find_file(source: str, name: str) -> Path | None:
    """The path of a file of a folder or Hub repo, None if it has none. Raises OSError."""
    if os.path.isdir(source):
        path = Path(source, name)
        return path if path.is_file() else None
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source):
        raise FileNotFoundError(f"model.init_from={source}: no such folder, and not user/name")
    hub = package("huggingface_hub")
    try:
        return Path(hub.hf_hub_download(source, name))
    except hub.errors.RemoteEntryNotFoundError:
        return None
    except Exception as e:  # the network has many ways to fail
        raise OSError(f"model.init_from={source}: {one_line(e)}") from e


@contextlib.contextmanager
def reading(source: str, name: str):
    """`with reading(source, name) as path`: whatever is wrong with the file becomes one line.
    Raises FileNotFoundError if it is not there, ValueError for all else."""
    path = find_file(source, name)
    if path is None:
        raise FileNotFoundError(f"model.init_from={source}: no {name} there; wanted is a whole "
                                f"model, saved by transformers (an adapter merged by peft)")
    try:
        yield path
    except Exception as e:  # so have files
        fault = f"{e} is missing" if isinstance(e, KeyError) else one_line(e)
        raise ValueError(f"model.init_from={source}: {name} cannot be used: {fault}") from None


def read_shape(hf: dict, block_size: int) -> dict:
    """The keys of DEFAULTS that a config.json asks for. Raises ValueError by the name of a setting
    that ReferenceTransformer cannot represent, KeyError for one that is missing."""
    # transformers 5 keeps base and scaling together, and lets an older rope_scaling win
    together = hf.get("rope_parameters") or {}
    rope = hf.get("rope_scaling") or together
    rope_type, family = rope.get("rope_type", rope.get("type", "default")), hf.get("model_type")
    said = {key: value for key, value in {**hf, **together, **rope}.items() if value is not None}
    # what the families assume where nothing is said; a 0 is read as in DEFAULTS
    hf = {"tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "head_dim": 0,
          "num_key_value_heads": 0, **said, "model_type": family, "rope_type": rope_type}
    for key, values in ONLY.items():
        if hf.get(key, values[0]) not in values:
            only = ", ".join(map(str, values))
            raise ValueError(f"{key}={str(hf[key])[:60]} is not supported, only {only}")
    block_size = min(block_size, hf["max_position_embeddings"])
    windowed = family == "mistral" or family != "llama" and hf.get("use_sliding_window")
    window = hf.get("sliding_window", block_size) if windowed else block_size
    if window < block_size:
        raise ValueError(f"sliding_window={window} is less than model.block_size={block_size}")
    shape = {ours: hf[theirs] for ours, theirs in NAMES.items()}
    if rope_type == "llama3":
        shape["rope_scaling"] = tuple(float(hf[key]) for key in SCALING)
    shape.update(block_size=block_size, qkv_bias=family == "qwen2", qk_norm=family == "qwen3")
    of_a_run = ("name", "init_from", "dropout")     # the checkpoint says nothing of these
    return {key: value for key, value in complete(shape).items() if key not in of_a_run}


def pretrained_config(c: dict) -> dict:
    """What the checkpoint c["init_from"] asks of a config: {"model": keys of DEFAULTS,
    "data": {"tokenizer": the checkpoint too, if it has one that is not of bytes}}. block_size is
    c's, or that of the checkpoint if it is less. Raises ValueError as read_shape(), or OSError."""
    source = c["init_from"]
    with reading(source, "config.json") as file:
        shape = read_shape(json.loads(file.read_bytes()), c["block_size"])
    of_bytes = find_file(source, "tokenizer.json") is None
    if of_bytes:
        print(f"notice   model.init_from={source}: no tokenizer.json there, text is read as bytes",
              flush=True)
    elif shape["vocab_size"] == 256:
        # an export of a model of bytes has a tokenizer that merges nothing: text stays bytes
        with reading(source, "tokenizer.json") as file:
            of_bytes = json.loads(file.read_bytes())["model"].get("merges") == []
    return {"model": shape, "data": {"tokenizer": "" if of_bytes else source}}


def load_pretrained(model, source: str):
    """Fill a ReferenceTransformer with the safetensors weights of a folder or Hub repo, one file at
    a time. Raises ValueError if they are not exactly its own, OSError if they cannot be read."""
    files, index = ["model.safetensors"], "model.safetensors.index.json"
    if find_file(source, index):
        with reading(source, index) as file:
            files = sorted(set(map(str, json.loads(file.read_bytes())["weight_map"].values())))
    # older files have the angles, too. A tied head is the embedding, and may be there once more
    left_out = ("inv_freq", "lm_head.weight") if model.config["tie_weights"] else ("inv_freq",)
    missing = set(model.state_dict())
    for name in files:
        with reading(source, name) as file:
            tensors = {key: t for key, t in package("safetensors.torch").load_file(file).items()
                       if not key.endswith(left_out)}
            for key, t in tensors.items():
                # whole numbers and 8-bit floats are quantized: they need scales that we do not read
                if not t.is_floating_point() or t.itemsize == 1 or not t.isfinite().all():
                    raise ValueError(f"{key} ({t.dtype}) is not finite numbers of a plain type")
            found = model.load_state_dict(tensors, strict=False)
            if found.unexpected_keys:
                raise ValueError(f"{found.unexpected_keys[0]} has no place in this model")
            missing &= set(found.missing_keys)
    if missing:
        raise ValueError(f"model.init_from={source}: {min(missing)} is missing")


def kept_of(source: str) -> tuple[dict, dict]:
    """What an export keeps of the checkpoint where its training began: what KEPT names of its
    config.json, and {name: bytes} of its generation_config.json."""
    kept, generation = {}, {}
    try:
        with reading(source, "config.json") as file:
            kept = {key: value for key, value in json.loads(file.read_bytes()).items()
                    if key in KEPT and value is not None}
        if file := find_file(source, "generation_config.json"):
            generation = {file.name: file.read_bytes()}
    except (ValueError, OSError) as e:  # it may be gone since
        print(f"notice   the export keeps no settings of its source: {e}", flush=True)
    return kept, generation


def exported_files(model, files: dict, ids: dict, source: str = "") -> dict:
    """{name: bytes} that make a folder with model.safetensors a model of transformers. `files` and
    `ids`, of SPECIAL_IDS, are the tokenizer's. What KEPT names and generation_config.json come from
    source, the model.init_from of the training. Raises ValueError for what no family has."""
    if not isinstance(model, ReferenceTransformer):
        raise ValueError(f"a {type(model).__name__} cannot be exported, only the reference model")
    c, scaling = model.config, dict(zip(SCALING, model.config["rope_scaling"]))
    if c["qkv_bias"] and c["qk_norm"]:
        raise ValueError("no family has model.qkv_bias together with model.qk_norm")
    kept, generation = kept_of(source) if source else ({}, {})
    family = "qwen2" if c["qkv_bias"] else "qwen3" if c["qk_norm"] else "llama"
    family = kept.get("model_type", family)
    config = {
        # None, or transformers assumes a window (Mistral) and the tokens of its own Llama
        "sliding_window": None, **dict.fromkeys(SPECIAL_IDS), **(ids or {}), **kept,
        **{theirs: c[ours] for ours, theirs in NAMES.items()}, "model_type": family,
        "architectures": [f"{family.capitalize()}ForCausalLM"], "hidden_act": "silu",
        "max_position_embeddings": max(c["block_size"], kept.get("max_position_embeddings", 0)),
        "torch_dtype": "float32"}
    if scaling["factor"] > 1:
        scaling[SCALING[3]] = int(scaling[SCALING[3]])      # tokens
        config["rope_scaling"] = {"rope_type": "llama3", **scaling}
    tokens = {key: config[key] for key in SPECIAL_IDS if config[key] is not None}
    if tokens and not generation:
        generation = {"generation_config.json": json.dumps(tokens, indent=2).encode()}
    return {"config.json": json.dumps(config, indent=2).encode(), **generation, **files}


def export(model, folder: str, files: dict, shard_size: str = "5GB"):
    """Write a folder that transformers, vLLM and llama.cpp read: `files` of exported_files(), and
    the weights, in several files above shard_size. An older export there goes. Raises OSError."""
    hub, safetensors = package("huggingface_hub"), package("safetensors")
    # named_parameters has tied weights once
    weights = {key: p.detach().cpu() for key, p in model.named_parameters()}
    try:
        os.makedirs(folder, exist_ok=True)
        Path(folder, "generation_config.json").unlink(missing_ok=True)
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        hub.save_torch_state_dict(weights, folder, max_shard_size=shard_size)   # removes old shards
        for file in Path(folder).glob("model*.safetensors"):
            file.chmod(Path(folder, "config.json").stat().st_mode)      # safetensors writes 0600
    except (OSError, safetensors.SafetensorError) as e:
        raise OSError(f"cannot write {folder}: {one_line(e)}") from e

# ---- the registry

MODELS = {"reference_transformer": ReferenceTransformer, "gpt": ReferenceTransformer}


def register_model(name: str, factory=None):
    """Also a decorator, `@register_model("mine")`. factory(dict) -> nn.Module."""
    if factory is None:
        return functools.partial(register_model, name)
    MODELS[name] = factory
    return factory


def build_model(config: dict) -> nn.Module:
    """The model that config["name"] says: a registered name, or `package.module:factory` from the
    import path. The factory gets `config` as it is. Raises ValueError for other names."""
    name = config.get("name", DEFAULTS["name"])
    factory = MODELS.get(name)
    if factory is None and ":" in str(name):
        module, _, attribute = name.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except Exception as e:  # their module may fail in any way
            raise ValueError(f"model.name={name}: {type(e).__name__}: {one_line(e)}") from e
    if factory is None:
        known = ", ".join([*sorted(MODELS), "or package.module:factory"])
        raise ValueError(f"model.name={name} is not known; there are {known}")
    # keep: before the first tensor is filled, because the threads torch starts then inherit it.
    # Sharp attention has probabilities below 1e-38, and a step full of them takes twice the time.
    torch.set_flush_denormal(True)
    model = factory(config)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.name={name} made a {type(model).__name__}, not an nn.Module")
    if config.get("init_from"):
        load_pretrained(model, config["init_from"])
    return model
