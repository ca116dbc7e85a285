"""The attempts at a plan of a call.

attempts         the graphs to plan, each where none before it fits
priced_attempts  the same, priced, for any budget
refusal          the error where none fits
"""

from .attempts import Attempt as Attempt
from .attempts import Attempts as Attempts
from .priced_attempts import PricedAttempts as PricedAttempts
from .priced_attempts import PricedStep as PricedStep
from .refusal import budget_error as budget_error
from .refusal import has_time_left as has_time_left
from .refusal import refuse_value_run as refuse_value_run
