"""
The master of a swarm: merges what the workers send and publishes the global model. A CPU is enough.

    python master.py                         # the hub is the folder ./runs/hub
    python master.py --hub=./other/folder --config=small --max-outer-steps=100

It may be killed, moved to another machine, started again: all its state is on the hub.
"""
import json
import signal
import sys

import torch

from config import load_config, shared_settings
from diloco import MasterOuterLoop, Refused, open_hub, set_tensors, swarm_tensors
from model import build_model
from trainer import TrainingError, build_data, mean_loss


def validation(config):
    """evaluate(weights) for the master: the loss of the global model on the validation data."""
    model, (_, data) = build_model(config["model"]), build_data(config)
    tensors = swarm_tensors(model)

    def evaluate(weights):
        set_tensors(tensors, weights)
        return mean_loss(model, data, config, torch.device("cpu"))
    return evaluate


def main(argv):
    try:
        config = load_config(argv)
        torch.manual_seed(config["run"]["seed"])
        model = build_model(config["model"])
        tensors = swarm_tensors(model)
        parameters = dict(model.named_parameters())
        published = {"config": shared_settings(config),
                     "buffers": [k for k in tensors if k not in parameters]}
        hub = open_hub(config["distributed"]["hub"], create=True,
                       private=config["distributed"]["private"])
        loop = MasterOuterLoop(hub, config["distributed"], tensors, published)
        if loop.state["config"] != json.loads(json.dumps(published["config"])):
            print("notice   this hub holds a run already: its model, data and schedule settings "
                  "are the ones that count")
        config = load_config(argv, loop.state["config"])
        loop.evaluate = validation(config) if config["run"]["eval_every"] else None
    except (ValueError, OSError, Refused) as e:
        return f"error: {e}"

    def stop(*_):
        loop.stop = True
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        loop.run()
    except (Refused, TrainingError) as e:
        return f"error: {e}"
    print(f"stop     at outer step {loop.state['outer_step']}: all is on the hub, "
          f"start it again anywhere", flush=True)


if __name__ == "__main__":
    if message := main(sys.argv[1:]):
        print(message, file=sys.stderr)
        sys.exit(2)
