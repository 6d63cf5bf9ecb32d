// Python and the package's own files, beside the page so that it goes on moving.
try {
  const { loadPyodide } = await import("./pyodide/pyodide.mjs");
  const pyodide = await loadPyodide();
  const archive = await fetch(new URL("package.zip", import.meta.url));
  pyodide.unpackArchive(await archive.arrayBuffer(), "zip");
  const { answer } = pyodide.pyimport("planner");
  self.onmessage = ({ data }) => {
    try {
      postMessage({ ...JSON.parse(answer(JSON.stringify(data))), best: data.best });
    } catch (error) {
      postMessage({ failed: String(error) });
    }
  };
  postMessage({ ready: true });
} catch (error) {
  postMessage({ failed: String(error) });
}
