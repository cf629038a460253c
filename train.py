"""
Train on this machine: CUDA, MPS or CPU.

    python train.py                          # the config `small`: minutes on a laptop, no download
    python train.py --config=small --resume  # go on where it stopped
    python train.py --config=small --resume --sample="def "     # continue a text
    python train.py --config=small --resume --export=DIR        # a folder that transformers reads
    python train.py --name=a,b --plot        # loss.svg of one run, or of several
    python train.py --help                   # every setting
"""
import sys
from pathlib import Path

import torch

from config import load_config
from model import build_model, export, exported_files, pretrained_config
from trainer import Trainer, TrainingError, build_data, plot, tokenizer_files


def main(argv):
    try:
        config = load_config(argv)
        if config["run"]["plot"]:
            return print(f"plot     {plot(config)}")
        if config["model"]["init_from"]:
            config = load_config(argv, pretrained=pretrained_config(config["model"]))
        run, folder = config["run"], config["run"]["export"]
        torch.manual_seed(run["seed"])  # the weights
        data = build_data(config)
        model = build_model(config["model"])
        if folder:              # what cannot be exported is said before the training
            files = exported_files(model, *tokenizer_files(config))
            Path(folder).mkdir(parents=True, exist_ok=True)
        trainer = Trainer(model, config, *data)
    except (ValueError, OSError, TrainingError) as e:
        # a mistake of the user: one line. Anything else is ours, with its traceback
        return f"error: {e}"
    asked = any(a.split("=")[0] in ("--sample", "--run.sample") for a in argv) and run["resume"]
    try:
        if asked or run["resume"] and folder:
            print(f"notice   at step {trainer.step}: no training; without --sample and --export "
                  f"--resume goes on", flush=True)
        else:
            trainer.train()
        if asked:
            trainer.print_sample(whole=True)
        if folder and not trainer.stop_signal:
            export(model, folder, files)
            print(f"export   {folder}", flush=True)
    except (TrainingError, OSError) as e:
        return f"error: {e}"


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    if message := main(sys.argv[1:]):
        print(message, file=sys.stderr)
        sys.exit(2)
