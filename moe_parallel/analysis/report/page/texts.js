// What tools/analyze.py found on given text.
function textsSection() {
  return null;
}
