"""Recurrent layers as ops of a graph.

layer_ops        run a layer over all of its steps: forward, and backward by autograd
saved_graph      the autograd graph of a layer's forward, apart from the tensors that it saves
autograd_modes   autograd as outside of a step, in a block inside of one
"""
