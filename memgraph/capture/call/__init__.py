"""The call that is captured.

call                  take a call apart into tensors and constants
changed_arguments     refuse a forward that puts something into its arguments
set_gradients         refuse gradients that forward puts into `.grad`
require_strided       refuse tensors that are not dense
"""
