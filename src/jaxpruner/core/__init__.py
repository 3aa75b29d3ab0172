"""What every room stands on: trees, masks, states, control flow, files and messages."""
