"""
Train on this machine: CUDA, MPS or CPU.

    python train.py                          # the config `small`: minutes on a laptop, no download
    python train.py --config=small --resume  # go on where it stopped
    python train.py --help                   # every setting
"""
import sys

import torch

from config import load_config
from model import build_model
from trainer import Trainer, TrainingError, build_data, generate


def print_sample(model, config):
    """Continue config.run.sample, as bytes."""
    model_config, run = config["model"], config["run"]
    ids = generate(model, list(run["sample"].encode()), 400,
                   model_config["block_size"], run["seed"])
    print(f"sample   {'-' * 60}\n"
          f"{bytes(i for i in ids if i < 256).decode(errors='replace')}\n{'-' * 69}", flush=True)


def main(argv):
    try:
        config = load_config(argv)
        torch.manual_seed(config["run"]["seed"])  # the weights
        data = build_data(config)
        model = build_model(config["model"])
        trainer = Trainer(model, config, *data)
    except (ValueError, OSError) as e:
        # a mistake of the user: one line. Anything else is ours, with its traceback
        return f"error: {e}"
    try:
        trainer.train()
    except TrainingError as e:
        return f"error: {e}"
    if config["run"]["sample"] and not trainer.stop_signal:
        print_sample(model, config)


if __name__ == "__main__":
    if message := main(sys.argv[1:]):
        print(message, file=sys.stderr)
        sys.exit(2)
