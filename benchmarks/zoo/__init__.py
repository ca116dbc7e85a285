"""Architectures as their libraries ship them, trained under budgets beside eager.

    python -m benchmarks.zoo [--only NAME] [--library timm] [--jobs 2] [--quick]

__main__            run each architecture in a process of its own; results/zoo.json and results/zoo.md
architectures       all architectures by name
libraries           their names
training            a model, the batch it is called with, and its loss
child               train one architecture, eager and then under each budget; a line of JSON for each
steps               train three steps, counted and compared
facts               the tensors that a step makes and changes
row                 what was found of one architecture, and its verdict
table               rows as Markdown, with a summary
models/             the architectures, a file for each family
torchvision_ops     import torchvision where its C extension can't be loaded
"""
