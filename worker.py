"""
A node of a swarm: trains here, and shares what it learns through the hub.

    python worker.py --node-id=a             # the hub is the folder ./runs/hub
    python worker.py --node-id=a --hub=user/repo

Model, data and schedule come from what master.py published; flags given here win. Started again, it
goes on where it was, with the flags it was begun with: its folder is runs/<name>/<node id>/.
"""
import os
import sys
from pathlib import Path

from config import OF_THE_MOMENT, end, leave_on_signals, load_config, read_flags

if __name__ == "__main__":
    leave_on_signals()      # before torch is imported, which takes seconds
    # two nodes on one machine would wait for each other in busy loops: six times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from diloco import DumbDiLoCo, Refused, open_hub, read_state
from model import build_model
from trainer import Trainer, TrainingError, build_data, load_checkpoint, say


def flags_of(argv):
    """{"--section.key": value} of the flags that count for the whole run."""
    return {f"--{section}.{key}": value for section, key, value in read_flags(argv)
            if (section, key) not in OF_THE_MOMENT}


def prepare(argv):
    config = load_config(argv)
    hub = open_hub(config["distributed"]["hub"])
    node = DumbDiLoCo(hub, config["distributed"]["node_id"], config["distributed"])
    published = read_state(hub)[1].config
    config = load_config(argv, published)
    run, flags = config["run"], flags_of(argv)
    folder = Path(run["output_dir"], run["name"], node.node_id)
    resume = run["resume"] or any(folder.glob("step_*.pt"))
    if resume:      # with the flags it was begun with; those given now win
        begun = load_checkpoint(config, check=False)[1]["config"]["run"].get("flags", {})
        kept = [f"{flag}={value}" for flag, value in begun.items() if flag not in flags]
        if kept:
            say(f"notice   as at the first start: {' '.join(kept)}")
        config, flags = load_config([*kept, *argv], published), {**begun, **flags}
    config["run"].update(resume=resume, flags=flags)
    node.settings = config["distributed"]
    torch.manual_seed(config["run"]["seed"])
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
