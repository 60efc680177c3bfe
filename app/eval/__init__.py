"""`tunesmith eval`: metrics of models on the same rows, their confidence intervals, and which differences they show."""
