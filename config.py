"""
Every setting of every script, as plain dicts, and the command line over them.

    python train.py --config=small --lr=1e-3 --max-steps=2_000 --resume
    python train.py --config=gpt2 --help

`base` holds each key with its default. A named config is a dict of differences; flags come on top.
A dotted key is exact (--optimizer.lr). A bare one is run.KEY if run has it, else the one section
that has it. A value is read as the type of its default: no exec, no eval. No secret is a key: the
Hub token comes from HF_TOKEN or the login. To add a flag, add a key to SETTINGS. This file imports
nothing of ours.
"""
import contextlib
import copy
import difflib
import math
import os
import re
import signal
import sys
import threading

# section -> key -> (default, what --help says of it)
SETTINGS = dict(
    run=dict(
        config=("small",          "the named config to start from: smoke | small | gpt2"),
        name=("",                 "folder of the run below output_dir; empty = the config's name"),
        seed=(1337,               "of the weights, the order of the data and dropout"),
        device=("auto",           "auto | cuda | cuda:N | mps | cpu"),
        precision=("auto",        "auto | fp32 | bf16 | fp16; what hardware lacks becomes fp32"),
        compile=(False,           "torch.compile; falls back to eager if it fails"),
        gradient_checkpointing=(False, "recompute activations: less memory, a third more time"),
        max_steps=(1000,          "absolute step to stop at: a run resumed at 900 does 100 more"),
        resume=(False,            "go on from the newest checkpoint in the run's folder"),
        best=(False,              "resume, sample, export: from the best checkpoint instead"),
        output_dir=("runs",       "runs live here"),
        eval_every=(100,          "steps between evaluations; 0 = only at the end"),
        eval_batches=(20,         "microbatches of validation data, the same ones each time"),
        sample=("",               "prompt to continue at each eval; of an existing run: at once"),
        export=("",               "transformers folder, at the end; of an existing run: at once"),
        expected_loss=(0.0,       "final validation loss to expect, printed first; 0 = not known"),
        plot=(False,              "train.py: draw loss.svg and end; several runs: --name=a,b"),
    ),
    model=dict(
        name=("reference_transformer", "a registered name, or your own: package.module:factory"),
        init_from=("",            "Llama, Mistral or Qwen2/3 to begin with: a folder, user/name"),
        vocab_size=(256,          "256 = bytes"),
        block_size=(256,          "positions per sample; the model refuses longer ones"),
        n_layer=(4,               "transformer blocks"),
        n_head=(4,                "query heads"),
        n_kv_head=(0,             "K/V heads, a divisor of n_head; 0 = n_head"),
        head_dim=(0,              "size of a head, even; 0 = d_model / n_head"),
        d_model=(256,             "width of the residual stream"),
        d_ff=(0,                  "width of the MLP; 0 = 8/3 d_model, up to a multiple of 64"),
        dropout=(0.0,             "0 to < 1, on the embedding and on each branch"),
        tie_weights=(True,        "input and output embeddings are one matrix"),
        qkv_bias=(False,          "biases of queries, keys and values (Qwen2)"),
        qk_norm=(False,           "RMSNorm on queries and keys, head by head (Qwen3)"),
        rope_base=(10000.0,       "base of the rotary angles"),
        rope_scaling=((1.0, 1.0, 4.0, 8192.0), "Llama 3's factor, low and high turns, old context"),
        norm_eps=(1e-5,           "of RMSNorm"),
    ),
    data=dict(
        path=("stdlib",           "stdlib | synthetic | file, folder or glob | hf://datasets/..."),
        val_path=("",             "validation data; empty = the last tenth of data.path, held out"),
        text_column=("text",      "column with the text in .jsonl and .parquet files"),
        tokenizer=("",            "empty = bytes | tokenizer.json, its folder or a Hub repo"),
        micro_batch_size=(16,     "samples per forward and backward"),
        target_batch_size=(16,    "samples per optimizer step: a multiple of micro_batch_size"),
        num_workers=(0,           "DataLoader processes; 0 = read in the training process"),
        prefetch_factor=(2,       "batches each of them keeps ready"),
        pin_memory=("auto",       "auto | true | false; auto = on CUDA"),
    ),
    optimizer=dict(
        name=("adamw",            "adamw | muon (hidden matrices, AdamW for the rest)"),
        lr=(1e-3,                 "peak learning rate"),
        betas=((0.9, 0.95),       "of AdamW, each 0 to < 1"),
        eps=(1e-8,                "of AdamW"),
        weight_decay=(0.1,        "on tensors of two dimensions or more"),
        grad_clip=(1.0,           "largest gradient norm; 0 = no clipping"),
        fused=(True,              "one kernel for all of AdamW, if torch has it for the device"),
    ),
    scheduler=dict(
        name=("cosine",           "cosine | constant | wsd (flat, last fifth linear to minimum)"),
        warmup_steps=(100,        "linear from 0 to lr; at most a tenth of a run it would outlast"),
        max_steps=(0,             "horizon: length of the LR curve; 0 = run.max_steps"),
        min_lr_ratio=(0.1,        "the curve ends at lr times this"),
    ),
    checkpoint=dict(
        every_steps=(250,         "steps between checkpoints; 0 = only at the end"),
        keep_last=(2,             "how many to keep, besides the best"),
    ),
    logging=dict(
        every_steps=(10,          "steps between log lines"),
        tensorboard=(False,       "scalars in the run's folder too: pip install tensorboard"),
    ),
    sample=dict(
        tokens=(400,              "how far run.sample goes on at the end; 100 or less on the way"),
        temperature=(0.8,         "divides the logits; 0 = always the likeliest token"),
        top_k=(0,                 "only the k likeliest tokens; 0 = all"),
        top_p=(1.0,               "only the likeliest tokens that have this probability together"),
    ),
    distributed=dict(
        node_id=("",              "who this machine is: letters, digits, . _ -"),
        hub=("./runs/hub",        "a folder (starts with . / file://) or user/name on the Hub"),
        bucket=("auto",           "Hub: where deltas go; auto = HUB-swarm, a name, or empty: none"),
        private=(True,            "the master creates the Hub repo private"),
        license=("",              "what the repo's page says, apache-2.0 for example"),
        inner_steps=(50,          "steps between two deltas of a node of median speed"),
        outer_lr=(0.7,            "of the outer Nesterov step"),
        outer_momentum=(0.9,      "of the outer Nesterov step"),
        outer_warmup=(20,         "rounds over which the outer momentum grows; 0 = constant"),
        round_timeout=(0.0,       "s a round waits after its first delta; 0 = two inner loops"),
        poll_interval=(0.0,       "s between looks at the hub; 0 = a tenth of an inner loop"),
        codec=("int4",            "how deltas and updates are written: fp32 bf16 int8 int4 int2"),
        commits_per_hour=(100,    "of all nodes and the master, on the Hub; 0 = no limit"),
        wait=(False,              "synchronous: stop at each boundary until the round is out"),
        max_pending=(4,           "deltas a node leaves waiting before it stops sending"),
        join_warmup=(20,          "steps over which a node that joins ramps its learning rate"),
        max_norm_ratio=(10.0,     "scale deltas down to this many medians of the norm; 0 = off"),
        keyframe_every=(10,       "outer steps between two uploads of the whole model"),
        squash_gb=(20.0,          "GB committed between squashes of the Hub's history; 0 = never"),
        max_outer_steps=(0,       "the swarm ends there; 0 = at run.max_steps"),
        status=(False,            "master.py: print the nodes and the losses, and end"),
    ),
)

base = {section: {key: default for key, (default, _) in keys.items()}
        for section, keys in SETTINGS.items()}

configs = dict(
    # seconds: does it run at all?
    smoke=dict(
        run=dict(max_steps=40, eval_every=20, eval_batches=4),
        model=dict(n_layer=2, n_head=2, d_model=64, block_size=64),
        data=dict(micro_batch_size=8, target_batch_size=16),
        scheduler=dict(warmup_steps=10),
        checkpoint=dict(every_steps=20),
    ),
    # minutes on two CPU cores: 3.3M parameters, 2.9M bytes of the Python standard library
    small=dict(
        run=dict(max_steps=700, precision="bf16", sample="def ", expected_loss=1.23),
        optimizer=dict(lr=2e-3),
    ),
    # the 124M shape, for one GPU
    gpt2=dict(
        run=dict(max_steps=20_000, eval_every=500, eval_batches=8),
        model=dict(vocab_size=50304, block_size=1024, n_layer=12, n_head=12, d_model=768),
        data=dict(micro_batch_size=4, target_batch_size=32, num_workers=2),
        optimizer=dict(lr=6e-4),
        scheduler=dict(warmup_steps=700),
        checkpoint=dict(every_steps=1000),
    ),
)

CHOICES = {
    "run.precision": ("auto", "fp32", "bf16", "fp16"),
    "data.pin_memory": ("auto", "true", "false"),
    "optimizer.name": ("adamw", "muon"),
    "distributed.codec": ("fp32", "bf16", "int8", "int4", "int2"),
    "scheduler.name": ("cosine", "constant", "wsd"),
}
AT_LEAST_ONE = ("run.max_steps", "run.eval_batches", "model.vocab_size", "model.block_size",
                "model.n_layer", "model.n_head", "model.d_model", "data.micro_batch_size",
                "data.target_batch_size", "data.prefetch_factor", "checkpoint.keep_last",
                "logging.every_steps", "distributed.inner_steps", "distributed.max_pending",
                "distributed.keyframe_every")
BELOW_ONE = ("model.dropout", "optimizer.betas", "distributed.outer_momentum")

# What each machine decides for itself. The nodes of a swarm take all else from the master.
OWN = dict(
    run=("config", "device", "compile", "gradient_checkpointing", "resume", "best", "output_dir",
         "export", "plot"),
    model=("init_from",),
    data=("num_workers", "prefetch_factor", "pin_memory"),
    checkpoint=tuple(base["checkpoint"]),
    logging=tuple(base["logging"]),
    distributed=("node_id", "hub", "bucket", "private", "license", "max_outer_steps", "status"),
)
SHARED = [(section, key) for section in base for key in base[section]
          if key not in OWN.get(section, ())]

# What belongs to one command, and not to the run that it goes on with.
OF_THE_MOMENT = {("run", key) for key in ("name", "output_dir", "resume", "best", "plot", "export")}
OF_THE_MOMENT |= {("distributed", key) for key in ("node_id", "hub", "status")}

# ---- the command line

TRUTH = {"true": True, "1": True, "false": False, "0": False}


def parse(text: str, default, key: str):
    """`text` as the type of `default`. Raises ValueError naming the key."""
    try:
        if isinstance(default, bool):
            return TRUTH[text.lower()]
        if isinstance(default, tuple):
            values = tuple(float(part) for part in text.strip("()[] ").split(","))
            if len(values) != len(default):
                raise ValueError
            return values
        return type(default)(text)
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number",
                tuple: f"numbers like {str(default)[1:-1].replace(' ', '')}"}[type(default)]
        raise ValueError(f"--{key}={text}: wants {kind}") from None


def resolve(key: str) -> tuple[str, str]:
    """(section, key) for a dotted or bare key. Raises ValueError for an unknown or ambiguous
    one."""
    key = key.replace("-", "_")
    if key in base["run"]:
        return "run", key
    places, names = [], {}
    for section in base:
        for name in base[section]:
            full = f"{section}.{name}"
            names[full] = full
            names.setdefault(name, full)
            if key in (name, full):
                places.append((section, name))
    if not places:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
        raise ValueError(f"--{key} is not a setting; the nearest is --{names[near]} (--help lists "
                         f"all)")
    if len(places) > 1:
        choice = " or ".join(f"--{section}.{name}" for section, name in places)
        raise ValueError(f"--{key} could be {choice}: write the section")
    return places[0]


def read_flags(argv: list[str]) -> list[tuple[str, str, str]]:
    """(section, key, text) of each flag: --key=value, --key value, or --key alone for a switch.
    Raises ValueError, in one line, for what is no setting."""
    flags, waiting = [], list(argv)
    while waiting:
        argument = waiting.pop(0)
        name, equals, text = argument[2:].partition("=")
        if not argument.startswith("--") or not name:
            raise ValueError(f"{argument!r} is not a setting: write --key=value")
        section, key = resolve(name)
        if not equals and isinstance(base[section][key], bool):
            text = "true"
            if waiting and waiting[0].lower() in TRUTH:
                text = waiting.pop(0)
        elif not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"{argument} wants a value: write {argument}=VALUE")
            text = waiting.pop(0)
        flags.append((section, key, text))
    return flags


def given(argv: list[str]) -> set[str]:
    """The "section.key" of each flag on a command line."""
    return {f"{section}.{key}" for section, key, _ in read_flags(argv)}


def named_config(argv: list[str]) -> str:
    """The value of the last --config, "" without one. Raises ValueError for an unknown one."""
    names = [text for section, key, text in read_flags(argv) if (section, key) == ("run", "config")]
    if names and names[-1] not in configs:
        raise ValueError(f"--config={names[-1]} is not known; there are {', '.join(configs)}")
    return names[-1] if names else ""


def load_config(argv: list[str], published: dict | None = None, pretrained: dict | None = None,
                remembered: dict | None = None) -> dict:
    """The config that command line arguments ask for, checked and with its derived values.

    Precedence: base, then the named config, then the settings of a model (`pretrained`), of the run
    that goes on (`remembered`, out of its checkpoint) or of a master (`published`), then the other
    flags. Raises ValueError, in one line, for whatever is wrong; prints the help and exits for
    --help.
    """
    if {"-h", "--help"} & set(argv):
        others = [argument for argument in argv if argument not in ("-h", "--help")]
        try:
            print(help_text(named_config(others) or "small"), flush=True)
        except OSError:     # `| head` has seen enough
            os._exit(0)
        raise SystemExit(0)
    flags, name = read_flags(argv), named_config(argv) or base["run"]["config"]
    asked = {(section, key) for section, key, _ in flags}
    config = copy.deepcopy(base)
    for changes in (configs[name], pretrained or {}):
        for section, values in changes.items():
            config[section].update(values)
    if remembered is not None:
        began = remembered.get("run", {}).get("config", name)
        if ("run", "config") in asked and began != name:
            raise ValueError(f"--config={name}: this run was begun with --config={began} and goes "
                             f"on with its own settings; leave --config out, or use another --name")
        keys = [(section, key) for section in base for key in base[section]]
        take_over(config, remembered, set(keys) - asked - OF_THE_MOMENT)
    if published is not None:
        take_over(config, published, set(SHARED) - asked)
        code = config["model"]["name"]
        if ":" in code and ("model", "name") not in asked:
            raise ValueError(f"the hub asks for the model {code}, which is code: if you trust it, "
                             f"say --model.name={code} yourself")
    for section, key, text in flags:
        config[section][key] = parse(text, base[section][key], f"{section}.{key}")
    for key, value in (pretrained or {}).get("model", {}).items():
        if config["model"][key] != value:
            raise ValueError(f"--model.{key}={config['model'][key]}: model.init_from has {value}")
    if published and config["data"]["tokenizer"] and ("data", "tokenizer") not in asked:
        # the hub holds it
        config["data"]["tokenizer"] = config["distributed"]["hub"].removeprefix("file://")
    config["run"]["name"] = config["run"]["name"] or name
    other = [key for section, key in asked
             if section in ("model", "data", "optimizer", "scheduler") or key == "max_steps"]
    if other and ("run", "expected_loss") not in asked:
        config["run"]["expected_loss"] = 0.0        # that was of the config as it is
    return derive(config)


def take_over(config: dict, source: dict, keys: set):
    """Put the settings that `source` has of (section, key) pairs into a config. They are data of
    the right type, never code. Raises ValueError."""
    for section, key in sorted(keys):
        config[section][key] = check_setting(source, section, key, config[section][key])
    length = config["scheduler"]["max_steps"]
    if ("scheduler", "max_steps") in keys and length == source.get("run", {}).get("max_steps"):
        config["scheduler"]["max_steps"] = 0    # it followed run.max_steps, and does so again


def check_setting(source: dict, section: str, key: str, otherwise):
    """A setting out of a checkpoint or a hub; `otherwise` where it has none. Raises ValueError."""
    values, default = source.get(section, {}), base[section][key]
    value = values.get(key, otherwise) if isinstance(values, dict) else None
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):     # a list in JSON
        value = tuple(v if isinstance(v, float) else math.nan for v in value)
    if (type(value) is not type(default)
            or isinstance(value, tuple) and len(value) != len(default)):
        raise ValueError(f"the setting {section}.{key}={value!r} that was published or saved is "
                         f"of the wrong type")
    return value


def shared_settings(config: dict) -> dict:
    """What a master publishes for its workers."""
    shared = {}
    for section, key in SHARED:
        shared.setdefault(section, {})[key] = config[section][key]
    if config["scheduler"]["max_steps"] == config["run"]["max_steps"]:
        shared["scheduler"]["max_steps"] = 0    # it ends with the run, also with a longer one
    return shared


def check_named(argv: list[str], published: dict) -> list[str]:
    """What to tell a user who gives --config for a hub that holds a run, where that run's settings
    count. Raises ValueError if it is another model."""
    name, others = named_config(argv), []
    if not name or name == published.get("run", {}).get("name"):
        return []
    for section, values in shared_settings(load_config([f"--config={name}"])).items():
        for key, value in values.items():
            there = check_setting(published, section, key, value)
            if there == value or key == "name":
                continue
            if section == "model":
                raise ValueError(f"--config={name} is another model than this hub's: "
                                 f"model.{key}={value}, there {there}; leave --config out, or use "
                                 f"another --hub")
            others.append(f"{section}.{key}={there}")
    if not others:
        return []
    return [f"notice   --config={name} counts for a new hub only; this one goes on with "
            f"{', '.join(others)}"]

# ---- the help

HELP = """\
Flags are --key=value or --key value, in any order; a switch such as --resume needs no value.
--max-steps is --max_steps. A key that two sections have needs its section: --optimizer.name.

    python train.py                       train the config `small`: minutes on a laptop
    python train.py --resume              go on where it stopped, with its own settings
    python train.py --config=gpt2 --help  what a config sets"""
FIRST = ("config", "name", "data.path", "max-steps", "lr", "micro-batch-size", "target-batch-size",
         "device", "precision", "resume", "sample", "export", "plot", "node-id", "hub")


def help_text(name: str = base["run"]["config"]) -> str:
    """The flags that people use first, what the config `name` sets, and every setting with its
    default, section by section."""
    def line(flag, value, text):
        value = ",".join(map(str, value)) if isinstance(value, tuple) else value
        value = str(value).lower() if isinstance(value, bool) else value
        shown = f"{flag}=" + (f"{value}" or '""')
        return f"  --{shown:<32} {text}"
    lines = [HELP, "", "first"]
    for flag in FIRST:
        section, key = resolve(flag)
        lines.append(line(flag, *SETTINGS[section][key]))
    lines += ["", f"what --config={name} sets"]
    for section, values in configs[name].items():
        lines += [line(f"{section}.{key}", value, SETTINGS[section][key][1])
                  for key, value in values.items()]
    for section, keys in SETTINGS.items():
        lines += ["", section]
        lines += [line(f"{section}.{key}", *setting) for key, setting in keys.items()]
    return "\n".join(lines)

# ---- how the entry scripts begin and end


def leave_on_signals():
    """While no training is under way there is nothing to save: Ctrl-C, SIGTERM and a closed
    terminal end the program at once, with status 0. The Trainer sets handlers of its own."""
    def leave(number, frame):
        with contextlib.suppress(OSError):      # keep: not print, which may be what is interrupted
            os.write(1, b"stop     at once: no training is under way\n")
        os._exit(0)     # keep: not an exception, which some module that is being imported swallows
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and not (name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN):
            signal.signal(number, leave)        # nohup has it ignored


def end(message: str | None):
    """Print what went wrong, if anything, and leave: with status 2 then, else 0."""
    if message:
        with contextlib.suppress(OSError):      # nobody may be listening
            print(message, file=sys.stderr, flush=True)
    if threading.active_count() > 1:
        # keep: an upload or an evaluation may be under way. When Python ends under a thread that is
        # inside of torch, C++ aborts the process
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        os._exit(2 if message else 0)
    sys.exit(2 if message else 0)

# ---- cross-checks


def check(holds, message: str):
    if not holds:
        raise ValueError(message)


def check_values(config: dict):
    """Each number and each choice by itself. Raises ValueError."""
    for section, values in config.items():
        for key, value in values.items():
            full, shown = f"{section}.{key}", str(value)[:40]
            numbers = value if isinstance(value, tuple) else (value,)
            for number in (n for n in numbers if not isinstance(n, str)):
                check(0 <= number < (2**63 if isinstance(number, int) else math.inf),
                      f"{full}={shown} must be finite and not negative")
                check(full not in BELOW_ONE or number < 1, f"{full}={shown} must be below 1")
            check(full not in AT_LEAST_ONE or value >= 1, f"{full}={shown} must be at least 1")
            check(full not in CHOICES or value in CHOICES[full],
                  f"{full}={shown} is not one of {', '.join(CHOICES.get(full, ()))}")
    ratio, top_p = config["scheduler"]["min_lr_ratio"], config["sample"]["top_p"]
    check(ratio <= 1, f"scheduler.min_lr_ratio={ratio} must be at most 1")
    check(0 < top_p <= 1, f"sample.top_p={top_p} must be above 0 and at most 1")


def check_names(config: dict):
    """The settings that are names. Raises ValueError."""
    node_id, name = config["distributed"]["node_id"], config["run"]["name"]
    check(config["data"]["text_column"], "data.text_column is empty: give the name of a column")
    check(re.fullmatch(r"|[A-Za-z0-9][A-Za-z0-9._-]{0,63}", node_id),
          f"distributed.node_id={node_id!r}: up to 64 letters, digits, dots, dashes, underscores")
    check(re.fullmatch(r"[\w.+-]*", config["distributed"]["license"]),
          f"distributed.license={config['distributed']['license']!r}: wants an identifier such as "
          f"apache-2.0")
    check(re.fullmatch(r"[^/\\\0-\x1f]+", name) and name not in (".", ".."),
          f"run.name={name} is no folder name")
    check(config["run"]["plot"] or "," not in name,
          f"run.name={name}: a comma is for several runs of --plot; use another name")


def derive(config: dict) -> dict:
    """Check the settings, fill in what follows from others, and check that all fit together.
    Raises ValueError."""
    check_values(config)
    check_names(config)
    model, data, scheduler = config["model"], config["data"], config["scheduler"]
    width, heads = model["d_model"], model["n_head"]
    model["n_kv_head"] = model["n_kv_head"] or heads
    model["d_ff"] = model["d_ff"] or 64 * math.ceil(width * 8 / 3 / 64)
    check(model["head_dim"] or width % heads == 0,
          f"model.d_model={width} is not divisible by model.n_head={heads}")
    model["head_dim"] = model["head_dim"] or width // heads
    check(heads % model["n_kv_head"] == 0,
          f"model.n_head={heads} is not divisible by model.n_kv_head={model['n_kv_head']}")
    check(model["head_dim"] % 2 == 0,
          f"model.head_dim (or model.d_model / model.n_head) = {model['head_dim']} is odd: "
          f"rotary positions need pairs")
    factor, low, high, _ = model["rope_scaling"]
    check(factor >= 1 and low < high,
          f"model.rope_scaling={model['rope_scaling']}: wants a factor of at least 1, and more "
          f"high than low turns")
    check(not model["init_from"] or model["name"] in ("reference_transformer", "gpt"),
          f"model.init_from fills the reference transformer, not model.name={model['name']}")

    micro, target = data["micro_batch_size"], data["target_batch_size"]
    check(target % micro == 0,
          f"data.target_batch_size={target} is not a multiple of data.micro_batch_size={micro}: it "
          f"is reached by accumulation")
    data["accumulation"] = target // micro
    scheduler["max_steps"] = scheduler["max_steps"] or config["run"]["max_steps"]
    return config
