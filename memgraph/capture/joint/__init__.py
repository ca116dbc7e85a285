"""The first trace: forward and backward, op by op.

trace_joint         trace a call, as often as it takes to know that every call gives this graph
traced_step         the function that is traced
joint_graph         its graph, and the roles of inputs and outputs
eager_behavior      let ops and libraries do what they do in eager
results             what forward returns: outputs, inputs, constants
gradients           tangents, and where gradients come from
leaf_inputs         inputs that forward may change in place though they require a gradient
"""
