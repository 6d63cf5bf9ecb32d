// Drives docs/site/static/planner.js and page.js on objects that stand for the browser's: node tests/site_scripts.js
const fs = require("fs"), path = require("path"), assert = require("assert");
const script = (name) => fs.readFileSync(path.join(__dirname, "../docs/site/static", name), "utf8");

class Element {
  constructor(more = {}) {
    const classes = new Set();
    this.classList = {
      add: (name) => classes.add(name),
      toggle: (name, on) => classes[on ? "add" : "delete"](name),
      contains: (name) => classes.has(name),
    };
    Object.assign(this, { textContent: "", innerHTML: "", hidden: false, dataset: {}, attributes: {}, heard: {} }, more);
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(name, listener) { this.heard[name] = listener; }
  tell(name) { this.heard[name]({ preventDefault() {} }); }
}

function planner() {
  const slider = new Element({ name: "dp", value: "1", dataset: { as: "power" } });
  const output = new Element(), controls = new Element(), asked = [], found = {};
  let worker;
  const form = new Element({
    elements: { dp: slider },
    querySelector: (what) => (what === "fieldset" ? controls : what === 'output[for="dp"]' ? output : null),
    querySelectorAll: () => [slider],
  });
  const byId = (id) => (found[id] ??= id === "planner" ? form : new Element());
  const document = { getElementById: byId, currentScript: { src: "http://here/_static/planner.js" } };
  class Worker {
    constructor() { worker = this; }
    postMessage(question) { asked.push(question); }
  }
  new Function("document", "location", "Worker", "setTimeout", script("planner.js"))(
    document, { protocol: "http:" }, Worker, () => 0);
  byId("planner-start").tell("click");
  const answer = (data) => worker.onmessage({ data });
  answer({ ready: true });
  return {
    slider, output, form, asked, answer, refusal: byId("planner-refused"),
    picture: byId("planner-picture"), best: byId("planner-best"),
    move(value) { slider.value = value; form.tell("input"); },
    grey: (place) => place.classList.contains("old"),
  };
}

const checks = {
  "a slider says the number that it stands for"() {
    const { slider, output, move } = planner();
    assert.deepEqual([slider.attributes["aria-valuetext"], output.textContent], ["2", 2]);
    move("3");
    assert.deepEqual([slider.attributes["aria-valuetext"], output.textContent], ["8", 8]);
  },
  "settings moved, then the best plans, while Python is busy: both are answered, and nothing stays grey"() {
    const page = planner();
    page.move("2");
    page.form.tell("submit");
    page.answer({ html: "of dp=2", values: {} });
    assert(page.grey(page.picture));
    page.answer({ html: "of dp=4", values: {} });
    assert(!page.grey(page.picture));
    page.answer({ html: "plans", values: {}, best: true });
    assert.deepEqual(page.asked, [{ dp: 2 }, { dp: 4 }, { dp: 4, best: true }]);
    assert.deepEqual([page.picture.innerHTML, page.best.innerHTML], ["of dp=4", "plans"]);
    assert(!page.grey(page.picture) && !page.grey(page.best));
  },
  "a refusal keeps its words while its settings stand, and the picture is grey as long"() {
    const page = planner();
    page.answer({ html: "of dp=2", values: {} });
    page.move("6");
    assert(page.grey(page.picture));
    page.answer({ refused: "dp is too large" });
    page.form.tell("submit");
    page.answer({ html: "plans", values: {}, best: true });
    assert.deepEqual([page.refusal.textContent, page.refusal.hidden], ["dp is too large", false]);
    assert(page.grey(page.picture) && !page.grey(page.best));
    page.move("1");
    assert(!page.grey(page.picture) && page.grey(page.best));
    page.answer({ html: "of dp=2", values: {} });
    assert(page.refusal.hidden);
  },
  "refused best plans say so until a setting moves"() {
    const page = planner();
    page.answer({ html: "of dp=2", values: {} });
    page.form.tell("submit");
    page.answer({ refused: "no plan", best: true });
    assert.deepEqual([page.refusal.textContent, page.grey(page.picture)], ["no plan", false]);
    page.move("2");
    page.answer({ html: "of dp=4", values: {} });
    assert(page.refusal.hidden);
  },
  "of several moves while Python is busy the last one counts"() {
    const page = planner();
    for (const value of ["2", "3", "4"]) page.move(value);
    page.answer({ html: "of dp=2", values: {} });
    assert.deepEqual(page.asked, [{ dp: 2 }, { dp: 16 }]);
  },
  "what is folded is printed, and folded again"() {
    const heard = {}, folds = [{ open: false }, { open: true }];
    const document = {
      querySelectorAll: (what) => (what.startsWith("details") ? folds.filter((fold) => !fold.open) : []),
      addEventListener() {},
    };
    new Function("document", "addEventListener", script("page.js"))(document, (name, listener) => { heard[name] = listener; });
    heard.beforeprint();
    assert.deepEqual(folds, [{ open: true }, { open: true }]);
    heard.afterprint();
    assert.deepEqual(folds, [{ open: false }, { open: true }]);
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    check();
  } catch (error) {
    console.error(`${name}: ${error.stack}`);
    process.exitCode = 1;
  }
}
