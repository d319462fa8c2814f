"""Speed and accuracy of the simulator."""
