"""The architectures, a file for each family; each maps names to functions that make a `Training`.

huggingface   make models of transformers and what they are called with
text          decoders and encoders
experts       mixtures of experts
sequences     encoders with decoders; state spaces and recurrences
vision        images, and images with text
audio         sound and time series
diffusion     diffusers
timm_nets     timm
torch_vision  torchvision
graph_nets    torch_geometric
plain         torch by itself
"""
