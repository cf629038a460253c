"""
A node of a swarm: trains here, and shares what it learns through the hub.

    python worker.py --node-id=a             # the hub is the folder ./runs/hub
    python worker.py --node-id=a --hub=user/repo

Model, data and schedule come from what master.py published; flags given here win. Started again, it
goes on where it was: its folder is runs/<name>/<node id>/.
"""
import signal
import sys
from pathlib import Path

import torch

from config import load_config
from diloco import DumbDiLoCo, Refused, open_hub, read_state
from model import build_model
from trainer import Trainer, TrainingError, build_data


def prepare(argv):
    config = load_config(argv)
    hub = open_hub(config["distributed"]["hub"])
    node = DumbDiLoCo(hub, config["distributed"]["node_id"], config["distributed"])
    config = load_config(argv, read_state(hub)[1]["config"])
    node.settings, run = config["distributed"], config["run"]
    folder = Path(run["output_dir"], run["name"], node.node_id)
    run["resume"] = run["resume"] or any(folder.glob("step_*.pt"))
    torch.manual_seed(run["seed"])
    data = build_data(config)
    return Trainer(build_model(config["model"]), config, *data, coordinator=node)


def main(argv):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        trainer = prepare(argv)
    except KeyboardInterrupt:
        print("stop     before the first step", flush=True)
        return
    except (ValueError, OSError, Refused, TrainingError) as e:
        return f"error: {e}"
    try:
        trainer.train()
        if trainer.coordinator.failed:
            raise trainer.coordinator.failed
    except (TrainingError, Refused) as e:
        return f"error: {e}"
    except KeyboardInterrupt:       # the second one
        sys.exit("stop     at once; what the newest checkpoint does not hold is lost")


if __name__ == "__main__":
    if message := main(sys.argv[1:]):
        print(message, file=sys.stderr)
        sys.exit(2)
