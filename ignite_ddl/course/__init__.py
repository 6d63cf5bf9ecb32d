"""What only the chapters use: data, small models, figures and the checks of the exercises."""
