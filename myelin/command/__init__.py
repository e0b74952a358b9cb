"""The `myelin` command: options, training with live progress, and the folder that a run leaves."""
