"""Mixed-integer linear programs by themselves: stated through PuLP, solved by HiGHS or CBC. No pipelines here."""
