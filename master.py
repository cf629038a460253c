"""
The master of a swarm: merges what the workers send and publishes the global model. A CPU is enough.

    python master.py                         # the hub is the folder ./runs/hub
    python master.py --hub=user/repo --config=small --max-outer-steps=100
    python master.py --hub=user/repo --status    # the nodes and the losses; needs to read only

It may be killed, moved to another machine, started again: all its state is on the hub.
"""
import signal
import sys

import torch

from config import load_config, shared_settings
from diloco import (STEP, MasterOuterLoop, Refused, open_hub, parse_state, retry, set_tensors,
                    status, swarm_tensors)
from model import build_model, exported_files, pretrained_config
from trainer import TrainingError, build_data, draw, mean_loss, tokenizer_files


def evaluation(config, model, data):
    """evaluate(weights, step): the global model's validation loss every run.eval_every steps."""
    run, last = config["run"], -1
    if not run["eval_every"]:
        return None

    def evaluate(weights, step):
        nonlocal last
        before, last = last, step // run["eval_every"]
        if last != before or step >= run["max_steps"]:
            set_tensors(swarm_tensors(model), weights)
            return mean_loss(model, data, config, torch.device("cpu"))
    return evaluate


def prepare(argv):
    """The loop over the hub, or None if only its status was asked for."""
    config = load_config(argv)
    settings = config["distributed"]
    hub = open_hub(settings["hub"], not settings["status"], settings["private"])
    if settings["status"]:
        return print(status(hub))
    _, content = retry(lambda: hub.read(STEP))
    if content is not None:     # it holds a run: its settings count, and flags that were given
        config = load_config(argv, parse_state(content)["config"])
        if config["model"]["init_from"]:
            print("notice   this hub holds a run: it goes on, model.init_from is not read")
        config["model"]["init_from"] = ""
    elif config["model"]["init_from"]:
        config = load_config(argv, pretrained=pretrained_config(config["model"]))
    _, data = build_data(config)
    torch.manual_seed(config["run"]["seed"])
    model = build_model(config["model"])
    tensors, parameters = swarm_tensors(model), dict(model.named_parameters())
    published = {"config": shared_settings(config),
                 "buffers": [k for k in tensors if k not in parameters]}
    files, ids = tokenizer_files(config)
    try:
        files = exported_files(model, files, ids.get("eos_token_id"))
    except ValueError as e:
        print(f"notice   transformers will not read this hub: {e}", flush=True)
    return MasterOuterLoop(hub, config["distributed"], tensors, published,
                           evaluation(config, model, data), files,
                           lambda curves: draw({"global model": curves}))


def main(argv):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        if (loop := prepare(argv)) is None:
            return

        def stop(number, _):
            loop.stop = True
            signal.signal(number, signal.SIG_DFL)   # the second one ends it at once
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        loop.run()
    except KeyboardInterrupt:
        return print("stop     before the first round", flush=True)
    except (ValueError, OSError, Refused, TrainingError) as e:
        return f"error: {e}"
    print(f"stop     at outer step {loop.state['outer_step']}: all is on the hub, "
          f"start it again anywhere", flush=True)


if __name__ == "__main__":
    if message := main(sys.argv[1:]):
        print(message, file=sys.stderr)
        sys.exit(2)
