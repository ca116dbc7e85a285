"""Plan a step for a device that is not here, for a model that has no weights.

fitted_step           capture, price and plan a step of a model without bytes
captured_graph        the graph of such a step
largest               the largest batch or sequence that fits
described_model       a model without bytes from its configuration
heads                 the task of a configuration of transformers, and the batch that trains it
denoisers             the models of diffusers, and their batch
device_profile        published or measured figures of a device
profile_prices        prices of ops from such figures
fake_update           states and workspace of an optimizer, on fake tensors
measured_profile      the figures of this machine's CPU
other_sizes           the step of a size that was not captured
fit_result            the answer, as text and as JSON
profiles/             a file for each device
"""
