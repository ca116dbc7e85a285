"""The libraries whose models are trained, apart from torch's import: a stage of `make gpu` names them to any Python."""

LIBRARIES = ("transformers", "diffusers", "timm", "torchvision", "torch_geometric", "torch")
