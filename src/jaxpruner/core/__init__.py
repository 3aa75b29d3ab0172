"""What every package stands on: trees, masks, states, control flow, files and messages."""
