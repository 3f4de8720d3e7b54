"""Linux processes: clocks, trees and identity."""
