"""
The master of a swarm: merges what the workers send and publishes the global model. A CPU is enough.

    python master.py                         # the hub is the folder ./runs/hub
    python master.py --hub=user/repo --config=small --max-outer-steps=100
    python master.py --hub=user/repo --status      # the nodes and the losses; reads only
    python master.py --hub=user/repo --export=DIR  # a folder for transformers; reads only

It may be killed, moved to another machine, started again: all its state is on the hub. Flags that
are given then change the run, but not the model.
"""
import functools
import os
import signal
import sys

from config import check_named, end, leave_on_signals, load_config, shared_settings

if __name__ == "__main__":
    leave_on_signals()      # before torch is imported, which takes seconds
    # two nodes on one machine would wait for each other in busy loops: six times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from diloco import (STEP, MasterOuterLoop, Patient, Refused, Unavailable, load_global, open_hub,
                    parse_state, set_tensors, status, swarm_tensors)
from model import build_model, export, exported_files, pretrained_config
from trainer import TrainingError, build_data, draw, mean_loss, say, tokenizer_files


def evaluation(config, model, data):
    """evaluate(weights, step): every run.eval_every steps, and at the end, a function that returns
    the validation loss of a copy of the weights."""
    run, last = config["run"], -1

    def evaluate(weights, step):
        nonlocal last
        before, last = last, step // max(1, run["eval_every"])
        if run["eval_every"] and last != before or step >= run["max_steps"]:
            set_tensors(swarm_tensors(model), weights)
            return functools.partial(mean_loss, model, data, config, torch.device("cpu"))
    return evaluate


def export_global(argv, hub, folder):
    """A folder that transformers reads, of the newest global model."""
    state, weights = load_global(hub)
    config = load_config(argv, state.config)
    config["model"]["init_from"] = ""
    model = build_model(config["model"])
    set_tensors(swarm_tensors(model), weights)
    export(model, folder, exported_files(model, *tokenizer_files(config)))
    say(f"export   {folder}: the global model of outer step {state.outer_step}")


def prepare(argv):
    """The loop over the hub, or None if only its status or the model was asked for."""
    config = load_config(argv)
    settings, folder = config["distributed"], config["run"]["export"]
    hub = open_hub(settings["hub"], not (settings["status"] or folder), settings["private"],
                   settings["bucket"])
    if settings["status"]:
        return say(status(hub))
    if folder:
        return export_global(argv, hub, folder)
    content, source = Patient(hub).read(STEP)[1], config["model"]["init_from"]
    if content is not None:     # it holds a run: its settings count, and flags that were given
        published = parse_state(content).config
        config = load_config(argv, published)
        for line in check_named(argv, published):
            say(line)
        config["model"]["init_from"] = source = ""
    elif source:
        config = load_config(argv, pretrained=pretrained_config(config["model"]))
    _, data = build_data(config)
    torch.manual_seed(config["run"]["seed"])
    model = build_model(config["model"])
    tensors, parameters = swarm_tensors(model), dict(model.named_parameters())
    published = {"config": shared_settings(config),
                 "buffers": [k for k in tensors if k not in parameters]}
    files, ids = tokenizer_files(config)
    try:
        files = exported_files(model, files, ids, source)
    except ValueError as e:
        say(f"notice   transformers will not read this hub: {e}")

    def picture(curves):
        return draw({"global model": curves})
    return MasterOuterLoop(hub, config["distributed"], tensors, published,
                           evaluation(config, model, data), files, picture)


def main(argv):
    try:
        if (loop := prepare(argv)) is None:
            return

        def stop(number, _):
            loop.stop = True
            signal.signal(number, signal.SIG_DFL)   # the second one ends it at once
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        loop.run()
    except (ValueError, OSError, Refused, Unavailable, TrainingError) as e:
        return f"error: {e.args[0] if isinstance(e, Unavailable) else e}"


if __name__ == "__main__":
    end(main(sys.argv[1:]))
