from qflash.cli import main

main(prog_name="qflash")
