"""Print plans, and keep them.

report          Report: plan, forecast and measurement of a step
report_data     the facts of a planned step
printout        a report as text
compiled_lines  the lines about what Inductor compiles
remedies        what would make a plan cheaper, forecast from its report
page            a report as a page for a browser
tables          numbers and tables as text
budget_curve    Sweep: time by budget
plan_diff       what two plans decide differently
chrome_trace    a planned step as a timeline for Perfetto
saved_plan      a plan in a file
repeatability   name the ops that need not give the same twice on a GPU
report_file     a report in a file
reuse_plan      apply a saved plan to a step, and check it
verification    the bounds of a saved plan, derived again
torch_snapshot  read torch's memory snapshot, without running any code in it
snapshot_peak   the peak of such a snapshot, and what lies between its buffers
given_reports   arguments that should be reports, texts or files of them
step_times      compare the time of later steps with their forecast
"""
