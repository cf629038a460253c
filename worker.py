"""
A node of a swarm: trains here, and shares what it learns through the hub.

    python worker.py --node-id=a             # the hub is the folder ./runs/hub

Model, data and schedule come from what master.py published; flags given here win. Started again, it
goes on where it was: its folder is runs/<name>/<node id>/.
"""
import sys
import tempfile
from pathlib import Path

import torch

from config import load_config
from diloco import DumbDiLoCo, Refused, open_hub, read_published
from model import build_model
from trainer import Trainer, TrainingError, build_data


def main(argv):
    try:
        config = load_config(argv)
        hub = open_hub(config["distributed"]["hub"])
        node = DumbDiLoCo(hub, config["distributed"]["node_id"], config["distributed"])
        with tempfile.TemporaryDirectory() as folder:
            published = read_published(hub, Path(folder))[0]
        config = load_config(argv, published["config"])
        node.settings, run = config["distributed"], config["run"]
        folder = Path(run["output_dir"], run["name"], node.node_id)
        run["resume"] = run["resume"] or any(folder.glob("step_*.pt"))
        torch.manual_seed(config["run"]["seed"])
        data = build_data(config)
        trainer = Trainer(build_model(config["model"]), config, *data, coordinator=node)
    except (ValueError, OSError, Refused) as e:
        return f"error: {e}"
    try:
        trainer.train()
    except (TrainingError, Refused) as e:
        return f"error: {e}"


if __name__ == "__main__":
    if message := main(sys.argv[1:]):
        print(message, file=sys.stderr)
        sys.exit(2)
