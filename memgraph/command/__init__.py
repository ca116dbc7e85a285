"""The command line: `memgraph plan`, `fit`, `sweep`, `show`, `diff`, `explain`, `verify`, `doctor`, `demo`.

app                  the program: which command, exit codes, errors
planning             plan, sweep, explain
files                show, diff, verify: commands that read plan files and no torch
fit                  a device that is not here
doctor               this machine
demo                 a small training, in a minute
factory              the model and the arguments of FILE:FACTORY
output               data to stdout, messages to stderr, files
budget_option        a budget as text
time_limit_option    seconds as text
"""
