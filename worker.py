"""
A node of a swarm: trains here, and shares what it learns through the hub.

    python worker.py --node-id=a             # the hub is the folder ./runs/hub
    python worker.py --node-id=a --hub=user/repo

Model, data and schedule come from what master.py published; flags given here win. Started again, it
goes on where it was: its folder is runs/<name>/<node id>/.
"""
import sys
from pathlib import Path

from config import end, leave_on_signals, load_config

if __name__ == "__main__":
    leave_on_signals()      # before torch is imported, which takes seconds

import torch

from diloco import DumbDiLoCo, Refused, open_hub, read_state
from model import build_model
from trainer import Trainer, TrainingError, build_data


def prepare(argv):
    config = load_config(argv)
    hub = open_hub(config["distributed"]["hub"])
    node = DumbDiLoCo(hub, config["distributed"]["node_id"], config["distributed"])
    config = load_config(argv, read_state(hub)[1].config)
    node.settings, run = config["distributed"], config["run"]
    folder = Path(run["output_dir"], run["name"], node.node_id)
    run["resume"] = run["resume"] or any(folder.glob("step_*.pt"))
    torch.manual_seed(run["seed"])
    data = build_data(config)
    return Trainer(build_model(config["model"]), config, *data, coordinator=node)


def main(argv):
    try:
        trainer = prepare(argv)
        trainer.train()
        if trainer.coordinator.failed:
            raise trainer.coordinator.failed
    except (ValueError, OSError, Refused, TrainingError) as e:
        return f"error: {e}"
    except KeyboardInterrupt:       # the second signal
        sys.exit("stop     at once: what the newest checkpoint does not hold is lost")


if __name__ == "__main__":
    end(main(sys.argv[1:]))
