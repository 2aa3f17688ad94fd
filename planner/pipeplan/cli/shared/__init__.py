"""What commands of several folders share: options of the same name, all that is printed, and completion of names."""
