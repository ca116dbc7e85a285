"""Draw a report as a page that a browser opens without a network.

page               a report as the text of one HTML file
page.html          the page; page.css: its colours and its layout
script/            what draws it, in the order of `page.SCRIPTS`
uplot/             uPlot, which draws the axes and the curves, with its licence and checksums
"""
