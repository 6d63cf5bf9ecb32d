// The planner's page: its sliders ask the worker, which asks the package.
const form = document.getElementById("planner");
const start = document.getElementById("planner-start");
const said = document.getElementById("planner-said");
const controls = form.querySelector("fieldset");
const refusal = document.getElementById("planner-refused");
const places = { one: document.getElementById("planner-picture"), best: document.getElementById("planner-best") };
const scripts = document.currentScript.src;
const answered = {}, refusals = {}; // of each place: the settings that it answers; why there is no newer answer
let worker, asked = null, waiting = {};

function settings() {
  const given = {};
  for (const { name, value, dataset } of form.querySelectorAll("select, input")) {
    given[name] = dataset.as === "power" ? 2 ** value : dataset.as === "text" ? value : Number(value);
    const shown = form.querySelector(`output[for="${name}"]`);
    if (!shown) continue;
    shown.textContent = given[name];
    form.elements[name].setAttribute("aria-valuetext", given[name]);
  }
  return given;
}

const placeOf = (question) => question.best ? "best" : "one";

// One question at a time; of those asked meanwhile only the last for each place counts.
function ask(question) {
  if (asked) { waiting[placeOf(question)] = question; return; }
  asked = question;
  worker.postMessage(question);
}

// What does not answer the settings as they stand is grey.
function fade() {
  const now = JSON.stringify(settings());
  for (const [name, place] of Object.entries(places)) place.classList.toggle("old", answered[name] !== now);
}

function show({ refused, html, values }) {
  const name = placeOf(asked);
  const { best, ...given } = asked;
  refusals[name] = refused ?? "";
  if (!refused) answered[name] = JSON.stringify(given);
  if (html) places[name].innerHTML = html;
  refusal.textContent = refusals.one || refusals.best || "";
  refusal.hidden = !refusal.textContent;
  fade();
  form.dataset.values = JSON.stringify(values ?? { refused });
}

function fail(words) {
  controls.disabled = true;
  said.textContent = `Python did not start: ${words}`;
}

start.addEventListener("click", () => {
  if (location.protocol === "file:") return fail("open the site through a server, python -m http.server -d build/site");
  start.disabled = true;
  said.textContent = "Loading Python …";
  const late = setTimeout(() => fail("no answer after two minutes"), 120000);
  worker = new Worker(new URL("worker.js", scripts), { type: "module" });
  worker.onerror = (event) => fail(event.message ?? "its worker stopped");
  worker.onmessage = ({ data }) => {
    if (data.failed) return fail(data.failed);
    if (data.ready) {
      clearTimeout(late);
      start.hidden = true;
      controls.disabled = false;
      said.textContent = "";
      ask(settings());
    } else {
      show(data);
      const next = Object.values(waiting);
      asked = null;
      waiting = {};
      for (const question of next) ask(question);
    }
  };
});
for (const moved of ["input", "change"]) {
  form.addEventListener(moved, () => { refusals.best = ""; fade(); ask(settings()); });
}
form.addEventListener("submit", (event) => { event.preventDefault(); ask({ ...settings(), best: true }); });
settings();
