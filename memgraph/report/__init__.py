"""Print plans, and keep them.

report          Report: plan, forecast and measurement of a step
report_data     the facts of a planned step
printout        a report as text
page            a report as a page for a browser
tables          numbers and tables as text
budget_curve    Sweep: time by budget
saved_plan      a plan in a file
repeatability   name the ops that need not give the same twice on a GPU
reuse_plan      apply a saved plan to a step, and check it
step_times      compare the time of later steps with their forecast
"""
