"""Print plans, and keep them.

report          Report: plan, forecast and measurement of a step
report_data     the facts of a planned step
printout        a report as text
compiled_lines  the lines about what Inductor compiles
remedies        what would make a plan cheaper, forecast from its report
page            a report as a page for a browser
peak_sentence   why the peak is where it is
notebook        a report in a cell of a notebook
tables          numbers and tables as text
budget_curve    Sweep: time by budget
chrome_trace    a planned step as a timeline for Perfetto
saved_plan      a plan in a file
repeatability   name the ops that need not give the same twice on a GPU
reuse_plan      apply a saved plan to a step, and check it
verification    the bounds of a saved plan, derived again
given_reports   arguments that should be reports, texts or files of them
step_times      compare the time of later steps with their forecast
explanation     why a plan does with a value what it does
tier_lines      say what a plan takes of each tier, where there are several
"""
